/* The memory of a launch: storages of outputs, and scratch, the largest first; and the outputs, each made by a recipe.
   The scratch is no tensor: torch's C functions allocate and free it, or where they fail its Python functions, which
   raise torch's errors. */

#include "launch_memory.h"
#include "data_ptr.h"
#include "module.h"

/* Each allocated region has to be in the order once: the storages, and the scratch if there is any. */
static int read_order(Layout *self, Pool *pool, PyObject *order) {
    Py_ssize_t made = PyTuple_GET_SIZE(self->storages), all = made + (self->scratch != 0);
    for (Py_ssize_t i = 0; i < made; i++)
        if (!is_tuple(PyTuple_GET_ITEM(self->storages, i), "allocation", i)) return -1;
    if (!(self->order = read_row(pool, order, "the order", 0, all, &self->allocated))) return -1;
    if (self->allocated != all) return refuse("so many regions are not allocated");
    for (Py_ssize_t i = 0; i < all; i++)
        for (Py_ssize_t j = 0; j < i; j++)
            if (self->order[j] == self->order[i]) return refuse("the order names a region twice");
    return 0;
}

/* Kinds of recipes: the recipe's object, the output `number`, the input `number`, the tensor of storage `number`, a
   view of that or of one of the `typed` after them, and what the object makes of the inputs and the storages. */
enum { GIVEN, REPEATED, SAME, WHOLE, PART, MADE };

static PyObject *name_view;

static int read_typed(Layout *self, Pool *pool) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->typed);
    if (!(self->viewed = pool_zeros(pool, count, sizeof *self->viewed))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->typed, i), *dtype;
        if (!is_tuple(item, "typed view", i)
            || !PyArg_ParseTuple(item, "nO;a typed view is (storage, dtype)", &self->viewed[i], &dtype))
            return -1;
        if (self->viewed[i] < 0 || self->viewed[i] >= PyTuple_GET_SIZE(self->storages))
            return refuse("a typed view of no storage");
    }
    return 0;
}

static int read_recipes(Layout *self, Pool *pool, Py_ssize_t *least) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->recipes), storages = PyTuple_GET_SIZE(self->storages);
    Py_ssize_t parts = storages + PyTuple_GET_SIZE(self->typed);
    if (read_typed(self, pool) || !(self->recipe = pool_zeros(pool, count, sizeof *self->recipe))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->recipes, i);
        Recipe *each = &self->recipe[i];
        Py_ssize_t ends[] = {1, i, PY_SSIZE_T_MAX, storages, parts, 1};
        if (!is_tuple(item, "recipe", i)
            || !PyArg_ParseTuple(item, "inOOOO;a recipe is (kind, number, object, size, stride, offset)", &each->kind,
                                 &each->number, &each->object, &each->size, &each->stride, &each->offset))
            return -1;
        if (each->kind < GIVEN || each->kind > MADE || each->number < 0 || each->number >= ends[each->kind])
            return refuse("a recipe of an output names what isn't there");
        if (each->kind == SAME && each->number >= *least)
            *least = each->number + 1; /* inputs that are no region may come last */
    }
    return 0;
}

int layout_init(Layout *self, Pool *pool, PyObject *order, Py_ssize_t *least) {
    return read_order(self, pool, order) || read_recipes(self, pool, least) ? -1 : 0;
}

static int allocate_scratch(const Layout *self, Handle stream, Handle *address) {
    PyObject *made;
    if (self->alloc && !self->alloc(self->scratch, address)) return 0;
    *address = NULL;
    made = PyObject_CallFunction(self->raw_alloc, "nN", (Py_ssize_t)self->scratch, PyLong_FromVoidPtr(stream));
    if (!made) return -1;
    *address = PyLong_AsVoidPtr(made);
    Py_DECREF(made);
    return PyErr_Occurred() ? -1 : 0;
}

static int release(const Layout *self, Handle address) {
    PyObject *number, *done;
    if (self->release && !self->release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(self->raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int free_scratch(const Layout *self, Memory *memory) {
    PyObject *type, *value, *trace;
    Handle was = memory->scratch;
    int code;
    if (!was) return 0;
    memory->scratch = NULL;
    PyErr_Fetch(&type, &value, &trace);
    code = release(self, was);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return code;
}

int allocate_memory(const Layout *self, Handle stream, Memory *memory, uint64_t *base) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->storages);
    base += self->inputs;
    base[count] = 0;
    if (!(memory->storages = PyTuple_New(count))) return -1;
    for (Py_ssize_t i = 0; i < self->allocated; i++) {
        Py_ssize_t k = self->order[i];
        PyObject *made;
        if (k == count) {
            if (allocate_scratch(self, stream, &memory->scratch)) return -1;
            base[k] = (uint64_t)(uintptr_t)memory->scratch;
            continue;
        }
        if (!(made = PyObject_Call(self->empty, PyTuple_GET_ITEM(self->storages, k), NULL))) return -1;
        PyTuple_SET_ITEM(memory->storages, k, made);
        if (address_of(made, base + k)) return -1;
    }
    return 0;
}

static PyObject *view_of(const Layout *self, PyObject *of, const Recipe *recipe) {
    PyObject *args[] = {of, recipe->size, recipe->stride, recipe->offset};
    return PyObject_Vectorcall(self->reinterpret, args, 4, NULL);
}

/* Returns a new tuple of the views of storages as other dtypes. */
static PyObject *typed_views(const Layout *self, PyObject *storages) {
    PyObject *made = PyTuple_New(PyTuple_GET_SIZE(self->typed));
    for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(made); i++) {
        PyObject *dtype = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->typed, i), 1);
        set_item(&made, i, PyObject_CallMethodOneArg(PyTuple_GET_ITEM(storages, self->viewed[i]), name_view, dtype));
    }
    return made;
}

PyObject *make_outputs(const Layout *self, PyObject *source, PyObject *storages) {
    PyObject *result, *typed, *args[] = {source, storages};
    Py_ssize_t count = PyTuple_GET_SIZE(storages), recipes = PyTuple_GET_SIZE(self->recipes);
    if (!(typed = typed_views(self, storages))) return NULL;
    result = PyTuple_New(recipes);
    for (Py_ssize_t i = 0; result && i < recipes; i++) {
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
        case MADE: out = PyObject_Vectorcall(each->object, args, 2, NULL); break;
        }
        set_item(&result, i, out);
    }
    Py_DECREF(typed);
    return result;
}

static int init(PyObject *module) { return (name_view = PyUnicode_InternFromString("view")) ? 0 : -1; }

PART(.module = "relaunch", .init = init)
