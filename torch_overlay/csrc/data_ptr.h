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

#define INLINE_DIMENSIONS 5

typedef struct {
    void *table;
    uint64_t references;
    Storage *storage;
    void *other[4];
    int64_t dimensions, size[INLINE_DIMENSIONS], stride[INLINE_DIMENSIONS]; /* of more, they lie elsewhere */
    int64_t offset, length;
    uint16_t dtype;
    int8_t device[2];
    uint8_t bits[4];
    uint64_t keys; /* for dispatch: conjugate and negative are among them */
} Tensor;

typedef struct {
    PyObject_HEAD
    Tensor *tensor;
} Holder;

#define DTYPES 128
extern PyTypeObject *tensor_type, *usual_type; /* usual_type: one of its subtypes */
extern uint8_t item_sizes[DTYPES];

/* Reads the address from the tensor's fields. Returns them, or NULL if they don't hold it. */
static inline const Tensor *fields_of(PyObject *object, uint64_t *address) {
    PyTypeObject *type = Py_TYPE(object);
    const Tensor *tensor;
    Storage *storage;
    if (type != usual_type && type != tensor_type && (!tensor_type || !PyType_IsSubtype(type, tensor_type)))
        return NULL;
    tensor = ((Holder *)object)->tensor;
    if (!tensor || !(storage = tensor->storage) || tensor->length <= 0 || tensor->dtype >= DTYPES
        || !item_sizes[tensor->dtype] || storage->asks)
        return NULL;
    *address = (uint64_t)(uintptr_t)storage->data + tensor->offset * item_sizes[tensor->dtype];
    return tensor;
}

/* Calls the object's `data_ptr()`. Returns -1 with an error if it has none. */
int asked_address(PyObject *object, uint64_t *address);

static inline int address_of(PyObject *object, uint64_t *address) {
    return fields_of(object, address) ? 0 : asked_address(object, address);
}
