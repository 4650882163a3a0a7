"""Addresses of many tensors at once.

    same(tensors, addresses, indices)   is tensors[i].data_ptr() == addresses[i] for all i of indices?
    addresses(tensors, indices)         (tensors[i].data_ptr(), ...)
    aligned(tensors, indices, masks)    has no address a bit of its mask?

These are torch's functions. By every public way, from C too, an address takes 60 ns, 10 us for the 149 parameters of a
model with 16 layers: more than all else that a relaunch does. So the C module of `native` reads the fields of the
tensor where they lie.

Note [Fields of a tensor]
A Python tensor holds a pointer to a TensorImpl, that one a pointer to a StorageImpl, an offset, a length and the
number of a dtype, and the StorageImpl the address. Where these lie is fixed for a build of torch, and is nowhere
promised: before the module reads anything, `teach` compares what it would read with `data_ptr()` for tensors of each
dtype, views, parameters and others. If one differs, it forgets the dtypes. A tensor that has no storage, no elements
or an unknown dtype is asked for `data_ptr()`. In a PyTorch tree this is a C++ function of ten lines.

A storage may want to be asked before anybody writes, which a flag of it says: one that is copied on write
(`torch._lazy_clone`) has the address that it shares until then. `data_ptr()` gives it memory of its own, so it is asked
for those, too. It makes no difference whether the graph writes there, as it makes none for the launcher of a kernel.

Of the fields nothing is remembered but the address: `p.data = x` exchanges the storage in the same TensorImpl, a
storage that is resized moves, and torch.utils.swap_tensors exchanges the TensorImpl of the same Python object.
"""

from __future__ import annotations

import logging
from operator import and_
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

SOURCE = r"""
/* ---- addresses of tensors: Note [Fields of a tensor] in `launch.data_ptrs` ---- */

typedef struct { void *table; uint64_t references; void *data, *other[4]; uint8_t flags[3], asks; } Storage;
typedef struct {
    void *table;
    uint64_t references;
    Storage *storage;
    void *other[15];
    int64_t offset, length;
    uint16_t dtype;
} Tensor;
typedef struct { PyObject_HEAD Tensor *tensor; } Holder;

#define DTYPES 128
static PyTypeObject *tensor_type, *usual_type; /* usual_type: one of its subtypes */
static PyObject *name_data_ptr;
static uint8_t item_sizes[DTYPES];

/* By the tensor's fields; 0: they don't tell. */
static inline int field_address(PyObject *object, uint64_t *address) {
    PyTypeObject *type = Py_TYPE(object);
    Tensor *tensor;
    Storage *storage;
    if (type != usual_type && type != tensor_type && (!tensor_type || !PyType_IsSubtype(type, tensor_type))) return 0;
    tensor = ((Holder *)object)->tensor;
    if (!tensor || !(storage = tensor->storage) || tensor->length <= 0 || tensor->dtype >= DTYPES
        || !item_sizes[tensor->dtype] || storage->asks) return 0;
    *address = (uint64_t)(uintptr_t)storage->data + tensor->offset * item_sizes[tensor->dtype];
    return 1;
}
static int asked_address(PyObject *object, uint64_t *address) {
    PyObject *number = PyObject_CallMethodNoArgs(object, name_data_ptr);
    if (!number) return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}
static int address_of(PyObject *object, uint64_t *address) {
    return field_address(object, address) ? 0 : asked_address(object, address);
}
static PyObject *aligned(PyObject *tensors, PyObject *indices, PyObject *masks) {
    uint64_t bad = 0;
    if (!PyList_CheckExact(tensors) || !PyTuple_CheckExact(indices) || !PyTuple_CheckExact(masks)
        || PyTuple_GET_SIZE(indices) != PyTuple_GET_SIZE(masks))
        return PyErr_Format(PyExc_TypeError, "aligned() wants a list of tensors, and two tuples of one length");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(indices); i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(indices, i));
        uint64_t mask = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(masks, i)), address;
        PyObject *tensor;
        int code;
        if (PyErr_Occurred()) return NULL;
        if (index < 0 || index >= PyList_GET_SIZE(tensors))
            return PyErr_Format(PyExc_IndexError, "aligned(): there is no tensor %zd", index);
        tensor = Py_NewRef(PyList_GET_ITEM(tensors, index));
        code = address_of(tensor, &address);
        Py_DECREF(tensor);
        if (code) return NULL;
        bad |= address & mask;
    }
    return PyBool_FromLong(!bad);
}
static PyObject *py_addresses(PyObject *module, PyObject *arg) {
    PyObject *tensors = PySequence_Tuple(arg), *result;
    if (!tensors) return NULL;
    if ((result = PyTuple_New(PyTuple_GET_SIZE(tensors))))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
            PyObject *number;
            uint64_t address;
            if (address_of(PyTuple_GET_ITEM(tensors, i), &address)
                || !(number = PyLong_FromUnsignedLongLong(address))) { Py_CLEAR(result); break; }
            PyTuple_SET_ITEM(result, i, number);
        }
    Py_DECREF(tensors);
    return result;
}
/* One tensor of a dtype, which tells the dtype's number; with None for a tensor all is forgotten. */
static PyObject *py_learn(PyObject *module, PyObject *args) {
    PyObject *object, *type;
    int size;
    uint16_t dtype;
    if (!PyArg_ParseTuple(args, "OOi", &type, &object, &size)) return NULL;
    if (object == Py_None) {
        memset(item_sizes, 0, sizeof item_sizes);
        Py_RETURN_NONE;
    }
    if (!PyType_Check(type) || !PyObject_TypeCheck(object, (PyTypeObject *)type))
        return PyErr_Format(PyExc_TypeError, "learn(type, tensor, item_size) takes a tensor of the type");
    dtype = ((Holder *)object)->tensor->dtype;
    if (dtype >= DTYPES) return PyErr_Format(PyExc_RuntimeError, "the number of a dtype is %d", (int)dtype);
    item_sizes[dtype] = (uint8_t)size;
    Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(type));
    Py_XSETREF(usual_type, (PyTypeObject *)Py_NewRef(Py_TYPE(object)));
    Py_RETURN_NONE;
}
"""


def same(tensors: Sequence[Any], addresses: Sequence[int], indices: Sequence[int]) -> bool:
    equal: Any = torch._C._tensors_data_ptrs_at_indices_equal
    return equal(list(tensors), list(addresses), list(indices))


def addresses(tensors: Sequence[Any], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple([tensors[i].data_ptr() for i in indices])


def aligned(tensors: Sequence[Any], indices: Sequence[int], masks: Sequence[int]) -> bool:
    return not any(map(and_, addresses(tensors, indices), masks))


def teach(native: Any) -> bool:
    """Shows the C module what tensors look like; if what it then reads is not so, it asks each tensor."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for dtype, size in item_sizes().items():
                native.learn(torch.Tensor, torch.empty(1, dtype=dtype), size)
            native.learn(torch.Tensor, torch.nn.Parameter(torch.ones(1)), torch.ones(1).itemsize)
            with torch.enable_grad():
                found = probes()
        if native.addresses(found) != tuple([t.data_ptr() for t in found]):
            raise RuntimeError("a tensor's fields lie elsewhere than in torch 2.15")
    except Exception as error:
        native.learn(torch.Tensor, None, 0)
        log.info("addresses of tensors are asked for, some 60 ns each: %s", error)
        return False
    return True


def probes() -> list[torch.Tensor]:
    """Tensors of many kinds, in host memory: Note [Fields of a tensor]."""
    shared = torch.ones(5)
    made = [torch._lazy_clone(shared), torch._lazy_clone(shared)[1:], shared]
    for dtype in item_sizes():
        for size in ((7,), (3, 5), ()):
            whole = torch.empty(size, dtype=dtype)
            made.append(whole)
            if size:
                made += [whole[1:], whole[-1], whole[1:].detach()]
    base = torch.ones(4, 6)
    grown = torch.empty(0).resize_(11)
    made += [torch.nn.Parameter(base), torch.nn.Parameter(base[1:, 2:], requires_grad=False), base.t(), base[2:].T]
    made += [base.clone().requires_grad_().exp(), base.expand(3, 4, 6), grown, grown[3:], torch.empty(0), base[4:]]
    other = torch.nn.Parameter(torch.ones(3))
    other.data = base[1]
    return [*made, other, torch.ones(8).view(torch.int16)[5:], torch.ones(3, dtype=torch.complex64).conj().imag]


def item_sizes() -> dict[torch.dtype, int]:
    """Bytes of an element of the dtypes that compiled code has."""
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    names += " complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    return {dtype: dtype.itemsize for name in names.split() if (dtype := getattr(torch, name, None)) is not None}
