/* Addresses of tensors. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    void *table;
    uint64_t references;
    void *data, *other[4];
    uint8_t flags[3], asks;
} Storage;

typedef struct {
    void *table;
    uint64_t references;
    Storage *storage;
    void *other[15];
    int64_t offset, length;
    uint16_t dtype;
} Tensor;

typedef struct {
    PyObject_HEAD
    Tensor *tensor;
} Holder;

#define DTYPES 128
extern PyTypeObject *tensor_type, *usual_type; /* usual_type: one of its subtypes */
extern uint8_t item_sizes[DTYPES];

/* Reads the address from the tensor's fields. Returns 0 if they don't hold it. */
static inline int field_address(PyObject *object, uint64_t *address) {
    PyTypeObject *type = Py_TYPE(object);
    Tensor *tensor;
    Storage *storage;
    if (type != usual_type && type != tensor_type && (!tensor_type || !PyType_IsSubtype(type, tensor_type))) return 0;
    tensor = ((Holder *)object)->tensor;
    if (!tensor || !(storage = tensor->storage) || tensor->length <= 0 || tensor->dtype >= DTYPES
        || !item_sizes[tensor->dtype] || storage->asks)
        return 0;
    *address = (uint64_t)(uintptr_t)storage->data + tensor->offset * item_sizes[tensor->dtype];
    return 1;
}

/* Calls the object's `data_ptr()`. Returns -1 with an error if it has none. */
int asked_address(PyObject *object, uint64_t *address);

static inline int address_of(PyObject *object, uint64_t *address) {
    return field_address(object, address) ? 0 : asked_address(object, address);
}
