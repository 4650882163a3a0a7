/* The outputs of a launch, each made by a recipe. */

#include "outputs.h"
#include "module.h"

/* Kinds of recipes: the recipe's object, the output `number`, the input `number`, the tensor of storage `number`, a
   view of that or of one of the `typed` after them, a new tensor of the object's arguments, and what the object makes
   of the inputs and the storages. */
enum { GIVEN, REPEATED, SAME, WHOLE, PART, EMPTY, MADE };

static PyObject *name_view;

static int read_typed(Outputs *self, Py_ssize_t storages) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->typed);
    if (!(self->viewed = zeros(count, sizeof *self->viewed))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->typed, i), *dtype;
        if (!is_tuple(item, "typed view", i)
            || !PyArg_ParseTuple(item, "nO;a typed view is (storage, dtype)", &self->viewed[i], &dtype))
            return -1;
        if (self->viewed[i] < 0 || self->viewed[i] >= storages) return refuse("a typed view of no storage");
    }
    return 0;
}

int outputs_init(Outputs *self, Py_ssize_t storages, Py_ssize_t *least) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->recipes), parts = storages + PyTuple_GET_SIZE(self->typed);
    if (read_typed(self, storages) || !(self->recipe = zeros(count, sizeof *self->recipe))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->recipes, i);
        Recipe *each = &self->recipe[i];
        Py_ssize_t ends[] = {1, i, PY_SSIZE_T_MAX, storages, parts, 1, 1};
        if (!is_tuple(item, "recipe", i)
            || !PyArg_ParseTuple(item, "inOOOO;a recipe is (kind, number, object, size, stride, offset)", &each->kind,
                                 &each->number, &each->object, &each->size, &each->stride, &each->offset))
            return -1;
        if (each->kind < GIVEN || each->kind > MADE || each->number < 0 || each->number >= ends[each->kind])
            return refuse("a recipe of an output names what isn't there");
        if (each->kind == EMPTY && !is_tuple(each->object, "what is allocated for recipe", i)) return -1;
        if (each->kind == SAME && each->number >= *least)
            *least = each->number + 1; /* inputs that are no region may come last */
    }
    return 0;
}

void outputs_clear(Outputs *self) {
    PyMem_Free(self->recipe);
    PyMem_Free(self->viewed);
}

static PyObject *view_of(const Outputs *self, PyObject *of, const Recipe *recipe) {
    PyObject *args[] = {of, recipe->size, recipe->stride, recipe->offset};
    return PyObject_Vectorcall(self->reinterpret, args, 4, NULL);
}

/* Returns a new tuple of the views of storages as other dtypes. */
static PyObject *typed_views(const Outputs *self, PyObject *storages) {
    PyObject *made = PyTuple_New(PyTuple_GET_SIZE(self->typed));
    for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(made); i++) {
        PyObject *dtype = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->typed, i), 1);
        PyObject *one = PyObject_CallMethodOneArg(PyTuple_GET_ITEM(storages, self->viewed[i]), name_view, dtype);
        if (!one)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i, one);
    }
    return made;
}

PyObject *make_outputs(const Outputs *self, PyObject *source, PyObject *storages) {
    PyObject *result, *typed, *args[] = {source, storages};
    Py_ssize_t count = PyTuple_GET_SIZE(storages), recipes = PyTuple_GET_SIZE(self->recipes);
    if (!(typed = typed_views(self, storages))) return NULL;
    if (!(result = PyTuple_New(recipes))) {
        Py_DECREF(typed);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < recipes; i++) {
        const Recipe *each = &self->recipe[i];
        Py_ssize_t n = each->number;
        PyObject *out = NULL;
        switch (each->kind) {
        case GIVEN: out = Py_NewRef(each->object); break;
        case REPEATED: out = Py_NewRef(PyTuple_GET_ITEM(result, n)); break;
        case SAME: out = PySequence_GetItem(source, n); break;
        case WHOLE: out = Py_NewRef(PyTuple_GET_ITEM(storages, n)); break;
        case PART:
            out = view_of(self, n < count ? PyTuple_GET_ITEM(storages, n) : PyTuple_GET_ITEM(typed, n - count), each);
            break;
        case EMPTY: out = PyObject_Call(self->empty, each->object, NULL); break;
        case MADE: out = PyObject_Vectorcall(each->object, args, 2, NULL); break;
        }
        if (!out) {
            Py_CLEAR(result);
            break;
        }
        PyTuple_SET_ITEM(result, i, out);
    }
    Py_DECREF(typed);
    return result;
}

static int init(PyObject *module) { return (name_view = PyUnicode_InternFromString("view")) ? 0 : -1; }

PART(.module = "relaunch", .init = init)
