"""Addresses of many tensors in one call.

    same(tensors, addresses, indices)   is tensors[i].data_ptr() == addresses[i] for all i of indices?
    addresses(tensors, indices)         (tensors[i].data_ptr(), ...)

A relaunch compares the address of each static input with what it was. By every public way, from C too, an address
takes 60 ns, 10 us for the 148 parameters of a model with 16 layers: more than all else that a relaunch does. So the C
module here reads the fields of the tensor where they lie.

Note [Fields of a tensor]
A Python tensor holds a pointer to a TensorImpl, that one a pointer to a StorageImpl, an offset, a length and the
number of a dtype, and the StorageImpl the address. Where these lie is fixed for a build of torch, and is nowhere
promised: before the module is used, what it reads is compared with `data_ptr()` for tensors of each dtype, views,
parameters and others. If one differs, or there is no C compiler, torch's functions take the module's place. A tensor
that has no storage, no elements or an unknown dtype is asked for `data_ptr()`. In a PyTorch tree this is a C++ function
of ten lines.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config


if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct { void *table; uint64_t references; void *data; } Storage;
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
static PyTypeObject *tensor_type;
static PyObject *data_ptr;
static uint8_t item_sizes[DTYPES];

static int address_of(PyObject *object, uint64_t *address) {
    if (tensor_type && PyObject_TypeCheck(object, tensor_type)) {
        Tensor *tensor = ((Holder *)object)->tensor;
        if (tensor && tensor->storage && tensor->length > 0 && tensor->dtype < DTYPES && item_sizes[tensor->dtype]) {
            *address = (uint64_t)(uintptr_t)tensor->storage->data + tensor->offset * item_sizes[tensor->dtype];
            return 0;
        }
    }
    PyObject *number = PyObject_CallMethodNoArgs(object, data_ptr);
    if (!number) return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}
static PyObject *item(PyObject *fast, Py_ssize_t index) {
    if (index >= 0 && index < PySequence_Fast_GET_SIZE(fast)) return PySequence_Fast_GET_ITEM(fast, index);
    return PyErr_Format(PyExc_IndexError, "index %zd is outside of a sequence of %zd", index,
                        PySequence_Fast_GET_SIZE(fast));
}
static PyObject *py_same(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *tensors = NULL, *known = NULL, *indices = NULL, *result = NULL;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "same(tensors, addresses, indices) takes 3 arguments");
    if (!(tensors = PySequence_Fast(args[0], "same(): tensors is no sequence"))) goto done;
    if (!(known = PySequence_Fast(args[1], "same(): addresses is no sequence"))) goto done;
    if (!(indices = PySequence_Fast(args[2], "same(): indices is no sequence"))) goto done;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(indices); i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(indices, i));
        PyObject *tensor, *number;
        uint64_t now, before;
        if (index == -1 && PyErr_Occurred()) goto done;
        if (!(tensor = item(tensors, index)) || !(number = item(known, index))) goto done;
        before = PyLong_AsUnsignedLongLong(number);
        if ((before == (uint64_t)-1 && PyErr_Occurred()) || address_of(tensor, &now)) goto done;
        if (now != before) { result = Py_NewRef(Py_False); goto done; }
    }
    result = Py_NewRef(Py_True);
done:
    Py_XDECREF(tensors); Py_XDECREF(known); Py_XDECREF(indices);
    return result;
}
static PyObject *py_addresses(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *tensors = NULL, *indices = NULL, *result = NULL;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "addresses(tensors, indices) takes 2 arguments");
    if (!(tensors = PySequence_Fast(args[0], "addresses(): tensors is no sequence"))) goto done;
    if (!(indices = PySequence_Fast(args[1], "addresses(): indices is no sequence"))) goto done;
    if (!(result = PyTuple_New(PySequence_Fast_GET_SIZE(indices)))) goto done;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(indices); i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(indices, i));
        PyObject *tensor, *number;
        uint64_t address;
        if ((index == -1 && PyErr_Occurred()) || !(tensor = item(tensors, index)) || address_of(tensor, &address)
            || !(number = PyLong_FromUnsignedLongLong(address))) { Py_CLEAR(result); goto done; }
        PyTuple_SET_ITEM(result, i, number);
    }
done:
    Py_XDECREF(tensors); Py_XDECREF(indices);
    return result;
}
/* learn(tensor, item_size): one tensor of a dtype, which tells the dtype's number. */
static PyObject *py_learn(PyObject *module, PyObject *args) {
    PyObject *object, *type;
    int size;
    if (!PyArg_ParseTuple(args, "OOi", &type, &object, &size)) return NULL;
    if (!PyType_Check(type) || !PyObject_TypeCheck(object, (PyTypeObject *)type))
        return PyErr_Format(PyExc_TypeError, "learn(type, tensor, item_size) takes a tensor of the type");
    uint16_t dtype = ((Holder *)object)->tensor->dtype;
    if (dtype >= DTYPES) return PyErr_Format(PyExc_RuntimeError, "the number of a dtype is %d", (int)dtype);
    item_sizes[dtype] = (uint8_t)size;
    Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {
    {"same", (PyCFunction)(void (*)(void))py_same, METH_FASTCALL, "same(tensors, addresses, indices) -> bool"},
    {"addresses", (PyCFunction)(void (*)(void))py_addresses, METH_FASTCALL, "addresses(tensors, indices) -> tuple"},
    {"learn", py_learn, METH_VARARGS, "learn(type, tensor, item_size)"}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_overlay_pointers", NULL, -1, methods};
PyMODINIT_FUNC PyInit_torch_overlay_pointers(void) {
    if (!(data_ptr = PyUnicode_InternFromString("data_ptr"))) return NULL;
    return PyModule_Create(&module);
}
"""


class PythonPointers:
    """The same by torch's own functions."""

    @staticmethod
    def same(tensors: Sequence[Any], addresses: Sequence[int], indices: Sequence[int]) -> bool:
        equal: Any = torch._C._tensors_data_ptrs_at_indices_equal
        return equal(list(tensors), list(addresses), list(indices))

    @staticmethod
    def addresses(tensors: Sequence[Any], indices: Sequence[int]) -> tuple[int, ...]:
        return tuple([tensors[i].data_ptr() for i in indices])


def probes() -> list[torch.Tensor]:
    """Tensors of many kinds, in host memory: Note [Fields of a tensor]."""
    made: list[torch.Tensor] = []
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


@functools.cache
def _native() -> Any:
    try:
        from triton.runtime.build import compile_module_from_src

        native = compile_module_from_src(SOURCE, "torch_overlay_pointers")
        with torch.inference_mode(False), torch.no_grad():
            for dtype, size in item_sizes().items():
                native.learn(torch.Tensor, torch.empty(1, dtype=dtype), size)
            with torch.enable_grad():
                found = probes()
        expected = tuple([t.data_ptr() for t in found])
        if native.addresses(found, tuple(range(len(found)))) != expected:
            raise RuntimeError("a tensor's fields lie elsewhere than in torch 2.15")
    except Exception as error:
        log.info("addresses of tensors are read by torch, some 60 ns slower each: %s", error)
        return None
    return native


def implementation() -> Any:
    """What has `same` and `addresses`."""
    return (_native() if config.native_relaunch else None) or PythonPointers
