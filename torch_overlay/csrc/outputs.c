/* The outputs of a launch, each made by a recipe. */

#include "outputs.h"
#include "module.h"

/* Kinds of recipes: the recipe's object, the output `number`, the input `number`, the tensor of storage `number`, a
   view of that, a view of the slab as its dtype `number`, a new tensor of the object's arguments, and what the object
   makes of the inputs and the storages. */
enum { GIVEN, REPEATED, SAME, WHOLE, PART, SAVED, EMPTY, MADE };

static PyObject *name_view;

int outputs_init(Outputs *self, PyObject *recipes, Py_ssize_t storages, int slab, Py_ssize_t *least) {
    Py_ssize_t count = PyTuple_GET_SIZE(recipes), types = PyTuple_GET_SIZE(self->types);
    if (!(self->recipe = zeros(count, sizeof *self->recipe))) return -1;
    self->recipes = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Recipe *each = &self->recipe[i];
        Py_ssize_t n, ends[] = {1, i, PY_SSIZE_T_MAX, storages, storages, types, 1, 1};
        if (!is_tuple(PyTuple_GET_ITEM(recipes, i), "recipe", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(recipes, i),
                                 "inOOOO;a recipe is (kind, number, object, size, stride, offset)", &each->kind, &n,
                                 &each->object, &each->size, &each->stride, &each->offset)) {
            memset(each, 0, sizeof *each);
            return -1;
        }
        each->number = n;
        Py_INCREF(each->object);
        Py_INCREF(each->size);
        Py_INCREF(each->stride);
        Py_INCREF(each->offset);
        if (each->kind < GIVEN || each->kind > MADE || n < 0 || n >= ends[each->kind] || (each->kind == SAVED && !slab))
            return refuse("a recipe of an output names what isn't there");
        if (each->kind == EMPTY && !is_tuple(each->object, "what is allocated for recipe", i)) return -1;
        if (each->kind == SAME && n >= *least) *least = n + 1; /* inputs that are no region may come last */
    }
    return 0;
}

void outputs_clear(Outputs *self) {
    for (Py_ssize_t i = 0; i < self->recipes; i++) {
        Recipe *each = &self->recipe[i];
        Py_XDECREF(each->object);
        Py_XDECREF(each->size);
        Py_XDECREF(each->stride);
        Py_XDECREF(each->offset);
    }
    PyMem_Free(self->recipe);
}

static PyObject *view_of(const Outputs *self, PyObject *of, const Recipe *recipe) {
    PyObject *args[] = {of, recipe->size, recipe->stride, recipe->offset};
    return PyObject_Vectorcall(self->reinterpret, args, 4, NULL);
}

/* Returns a new tuple of the slab as a tensor of each dtype. */
static PyObject *typed_slabs(const Outputs *self, PyObject *slab) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->types);
    PyObject *typed = PyTuple_New(slab ? count : 0);
    for (Py_ssize_t i = 0; typed && i < PyTuple_GET_SIZE(typed); i++) {
        PyObject *one = PyObject_CallMethodOneArg(slab, name_view, PyTuple_GET_ITEM(self->types, i));
        if (!one)
            Py_CLEAR(typed);
        else
            PyTuple_SET_ITEM(typed, i, one);
    }
    return typed;
}

PyObject *make_outputs(const Outputs *self, PyObject *source, PyObject *storages, PyObject *slab) {
    PyObject *result, *typed, *args[] = {source, storages};
    if (!(typed = typed_slabs(self, slab))) return NULL;
    if (!(result = PyTuple_New(self->recipes))) {
        Py_DECREF(typed);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < self->recipes; i++) {
        const Recipe *each = &self->recipe[i];
        PyObject *out = NULL;
        switch (each->kind) {
        case GIVEN: out = Py_NewRef(each->object); break;
        case REPEATED: out = Py_NewRef(PyTuple_GET_ITEM(result, each->number)); break;
        case SAME: out = PySequence_GetItem(source, each->number); break;
        case WHOLE: out = Py_NewRef(PyTuple_GET_ITEM(storages, each->number)); break;
        case PART: out = view_of(self, PyTuple_GET_ITEM(storages, each->number), each); break;
        case SAVED: out = view_of(self, PyTuple_GET_ITEM(typed, each->number), each); break;
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
