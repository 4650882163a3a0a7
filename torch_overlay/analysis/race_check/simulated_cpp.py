"""Run a generated C++ wrapper on the simulated device: compile its text against stand-ins, which call Python.

The wrapper's own C++ runs, with the package's header for regions: its allocations and frees, guards, records and waits.
Functions of the C shim, launches, and calls of the driver come here (`simulated_wrapper.h`), each with its arguments as
ints and addresses. A tensor is a number in a table, and a function of ATen is called by its schema.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import csrc
from torch_overlay._inductor.streams import runtime as stream_runtime
from torch_overlay.analysis.race_check.kernel_ranges import HostKernelRanges
from torch_overlay.analysis.race_check.simulated_module import _reinterpret, _Triton, CheckError, launch_on_host, Module


if TYPE_CHECKING:
    from collections.abc import Sequence

_STAND_IN = Path(__file__).with_name("simulated_wrapper.h")
_ENTRY = re.compile(r"void (inductor_entry_impl|AOTInductorModel::run_impl)\(.*?\} // \1", re.DOTALL)
_STATIC = re.compile(r"^static (?:thread_local )?torch_overlay::.*;$", re.MULTILINE)
_CALLED = re.compile(r"\b(aoti_torch_\w+|call_\w+|cpp_fused\w*)\(")
_CONSTANT = re.compile(r"\bcached_torch_(\w+?)_(\w+)\b")
_KERNEL = re.compile(r'(\w+)_source = R"TRITON\(\n?async_compile\.triton\(\'(\w+)\', \'\'\'(.*?)\'\'\'', re.DOTALL)
_MISALIGNED = 4


class _Argument(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char), ("number", ctypes.c_int64), ("value", ctypes.c_double)]


_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_Argument))


def source_of(text: str) -> tuple[str, list[str]]:
    """Return the C++ to be compiled of a generated module's text, and the names of its constants, by number."""
    entry = _ENTRY.search(text)
    assert entry is not None
    body = entry[0].replace(", kernels, this->cubin_dir_)", ")")
    is_package = entry[1].startswith("AOT")
    given = re.search(r"raii_handles\(input_handles, (\d+)\)", body)
    call = "inductor_entry_impl(inputs, outputs)"
    if is_package:
        call = f"""
            AOTInductorModel model;
            model.constants = {{inputs + {given[1] if given else 0}}};
            model.run_impl(inputs, outputs, torch_overlay::current_stream(0), nullptr)"""
    if re.search(r"custom_op_wrapper|aoti_torch_call_dispatcher|c10::IValue|\.size\(|temporary_reference", body):
        raise CheckError("the C++ calls operators by the dispatcher, or reads sizes, which isn't simulated")
    of_headers = ("clone_preserve_strides", "copy_", "get_current_cuda_stream", "new_tensor_handle")
    names = sorted({*_CALLED.findall(body), *(f"aoti_torch_{name}" for name in of_headers)})
    constants = sorted({found[0] for found in _CONSTANT.finditer(body)})
    functions = [
        f'template <class... A> int64_t {name}(const A&... given) {{ return call_python("{name}", given...); }}'
        for name in names
    ]
    parts = (
        _STAND_IN.read_text(),
        *(f"constexpr int32_t {name} = {number};" for number, name in enumerate(constants)),
        *functions,
        (csrc.FOLDER / "generated_region.h").read_text(),
        *_STATIC.findall(text),
        body,
        'extern "C" int run(Call call, AtenTensorHandle* inputs, AtenTensorHandle* outputs) {',
        "    to_python = call;",
        f"    try {{ {call}; }} catch (const std::exception&) {{ return 1; }}",
        "    return 0;",
        "}",
    )
    return "\n".join(parts), constants


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="torch_overlay_cpp_")


@functools.cache
def compiled(source: str) -> Path:
    name = hashlib.sha256(source.encode()).hexdigest()[:20]
    path = Path(_folder().name) / name
    path.with_suffix(".cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"{path}.cpp", "-o", f"{path}.so"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise CheckError(f"the C++ doesn't compile: {made.stderr[:2000]}")
    return path.with_suffix(".so")


class CppModule(Module):
    """A generated module whose `call` is C++."""

    def load(self, text: str) -> None:
        self.source, self.constants = source_of(text)
        kernels = _KERNEL.findall(text)
        self.kernels = {name: _Triton(self.device, function, source) for name, function, source in kernels}
        count = re.search(r"(?:num_outputs=|AOTInductorModelBase\(\d+,\s+)(\d+)", text)
        assert count is not None
        self.outputs = int(count[1])
        self.scope = {"call": self.run}
        self.tensors: dict[int, Any] = {}
        self.events: list[torch.Event] = []
        self.streams: dict[int, Any] = {}
        self.regions: dict[str, stream_runtime.CppRegion] = {}
        self.next = 0
        self.error: BaseException | None = None
        self.given: set[int] = set()

    # ---- a call

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """A copy of the compiled text for this module alone: its events are those of this module."""
        path = compiled(self.source)
        own = tempfile.mktemp(".so", path.stem, path.parent)
        return ctypes.CDLL(shutil.copy(path, own))

    def run(self, args: list[Any]) -> list[Any]:
        inputs = (ctypes.c_int64 * (len(args) + 1))(*map(self.keep, args))
        self.given = {i for i, tensor in zip(inputs, args) if isinstance(tensor, torch.Tensor)}
        outputs = (ctypes.c_int64 * (self.outputs + 1))()
        args.clear()
        call = _CALL(self.answer)
        if self.library.run(call, inputs, outputs):
            raise self.error or CheckError("the C++ raised an exception")
        numbers = outputs[: self.outputs]  # one may come twice
        results = [self.tensors.get(number) for number in numbers]
        for number in numbers:
            self.tensors.pop(number, None)
        return results

    def keep(self, tensor: Any) -> int:
        self.next += 1
        self.tensors[self.next] = tensor
        return self.next

    def answer(self, name: bytes, count: int, arguments: Any) -> int:
        try:
            return self.dispatch(name.decode(), arguments[:count]) or 0
        except BaseException as error:  # ctypes can't raise it
            self.error = self.error or error
            return -1

    def value(self, argument: Any) -> Any:
        kind = argument.kind
        return self.tensors[argument.number] if kind == b"t" else argument.value if kind == b"d" else argument.number

    def dispatch(self, name: str, arguments: Sequence[Any]) -> int | None:
        method = getattr(self, f"on_{name.removeprefix('aoti_torch_')}", None)
        if method is not None:
            return method(*map(self.value, arguments) if name != "delete" else (arguments[0].number,))
        if name.startswith("call_"):
            *values, _, stream = map(self.value, arguments)
            self.kernels[name.removeprefix("call_")].run(*values, stream=stream)
        elif name.startswith("cpp_fused"):
            self.host_kernel(name, [a for a in arguments if a.kind in b"pw"])
        else:
            self.operator(name, list(arguments))
        return None

    def host_kernel(self, name: str, arguments: Sequence[Any]) -> None:
        source = self.text.rpartition(f"void  {name}(")[2].partition("\n}\n")[0]
        parameters = re.findall(r"\*\s*(\w+)", source.partition(")")[0])
        given = [(p, self.tensors[a.number >> 4], a.kind == b"w") for p, a in zip(parameters, arguments, strict=True)]
        launch_on_host(self.device, HostKernelRanges(source), given)

    # ---- tensors

    def store(self, tensor: Any, address: int) -> None:
        _write(address, self.keep(tensor))

    on_assign_tensors_out = on_new_tensor_handle = store
    on_scalar = keep

    def ints(self, address: int, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address)) if count else []

    def constant(self, number: int) -> Any:
        name = self.constants[number].removeprefix("cached_torch_")
        kind, _, value = name.partition("_")
        return getattr(torch, value) if kind == "dtype" else value.removeprefix("type_")

    def on_delete(self, number: int) -> None:
        del self.tensors[number]

    def on_data_ptr(self, tensor: torch.Tensor) -> int:
        number = next(n for n, known in self.tensors.items() if known is tensor)
        return number << 4 | (_MISALIGNED if self.device.misaligned and number in self.given else 0)

    def empty(self, pinned: bool, *given: int) -> None:
        ndim, sizes, strides, dtype, kind, index, address = given
        kind = self.constant(kind)
        where = f"cuda:{index}" if kind == "cuda" else kind
        size, stride = self.ints(sizes, ndim), self.ints(strides, ndim)
        made = torch.empty_strided(size, stride, dtype=self.constant(dtype), device=where, pin_memory=pinned)
        self.store(made, address)

    on_empty_strided = functools.partialmethod(empty, False)
    on_empty_strided_pinned = functools.partialmethod(empty, True)

    def on_reinterpret(self, tensor: torch.Tensor, ndim: int, sizes: int, strides: int, offset: int) -> int:
        return self.keep(_reinterpret(tensor, self.ints(sizes, ndim), self.ints(strides, ndim), offset))

    def on_clone_preserve_strides(self, tensor: torch.Tensor, address: int) -> None:
        self.store(tensor.clone(), address)

    def on_item_int64(self, value: int, address: int) -> None:
        _write(address, value)

    def on_copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: int) -> None:
        target.copy_(source, bool(non_blocking))

    def operator(self, name: str, arguments: list[Any]) -> None:
        overload = _overloads().get(re.sub(r"aoti_torch_(cuda|cpu)_", "", name))
        if overload is None:
            raise CheckError(f"{name} can't be simulated")
        schema = overload._schema.arguments
        ordered = sorted(schema, key=lambda a: not a.is_out)  # the C function has the outputs first
        given = {a.name: self.operand(str(a.type), arguments) for a in ordered}
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = overload(**given)
        results = result if isinstance(result, tuple) else (result,)
        for argument, tensor in zip(arguments, results):
            self.store(tensor, argument.number)

    def operand(self, kind: str, arguments: list[Any]) -> Any:
        first = arguments.pop(0)
        if kind == "Tensor":
            return self.value(first)
        if kind == "Optional[Tensor]":
            return self.tensors.get(ctypes.c_int64.from_address(first.number).value) if first.number else None
        if kind == "List[int]":
            return self.ints(first.number, arguments.pop(0).number)
        if kind == "bool":
            return bool(first.number)
        if kind in ("int", "float", "number"):
            return self.value(first)
        if kind.startswith("Optional") and not first.number:
            return None
        raise CheckError(f"an argument of type {kind} can't be simulated")

    # ---- streams and events

    def known(self, stream: Any) -> int:
        self.streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def on_get_current_cuda_stream(self, device: int, address: int) -> None:
        _write(address, self.known(stream_runtime.callers_stream(device)))

    def on_set_device(self, index: int) -> None:
        torch._C._cuda_setDevice(index)

    def on_set_stream(self, handle: int, device: int) -> int:
        before = self.known(stream_runtime.callers_stream(device))
        stream_runtime.set_stream(self.streams[handle])
        return before

    def on_restore_stream(self, before: int) -> None:
        stream_runtime.set_stream(self.streams[before])

    def region(self, address: int) -> stream_runtime.CppRegion:
        spec = ctypes.string_at(address).decode()
        if spec not in self.regions:
            self.regions[spec] = stream_runtime.CppRegion(spec)
        return self.regions[spec]

    def on_enter(self, spec: int, address: int, count: int) -> int:
        region = self.region(spec)
        *raw, is_aliased = region.enter()
        self.streams |= zip(raw, map(stream_runtime.find_stream, region.spec.streams))
        (ctypes.c_int64 * count).from_address(address)[:] = raw
        return int(is_aliased)

    def on_leave(self, spec: int) -> None:
        self.region(spec).leave()

    def on_use_event(self, spec: int, number: int, method: int, stream: int) -> None:
        self.region(spec).use_event(number, ctypes.string_at(method).decode(), stream)

    def on_record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self.streams[stream])

    def on_create_stream(self) -> int:
        return self.known(torch.cuda.Stream())

    def on_create(self) -> int:
        self.events.append(torch.cuda.Event())
        return len(self.events)

    def on_record(self, event: int, stream: int) -> None:
        self.events[event - 1].record(self.streams[stream])

    def on_wait(self, event: int, stream: int) -> None:
        self.events[event - 1].wait(self.streams[stream])

    def on_synchronize(self, event: int) -> None:
        self.events[event - 1].synchronize()

    def on_synchronize_stream(self, stream: int) -> None:
        self.streams[stream].synchronize()


def _write(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def module_type(text: str) -> type[Module]:
    return CppModule if re.search("cpp_wrapper_src|AOTInductorModel::", text) else Module


@functools.cache
def _overloads() -> dict[str, Any]:
    """Map the names in the C shim to overloads of ATen."""
    from torchgen.aoti.fallback_ops import inductor_fallback_ops

    found = {}
    for name in inductor_fallback_ops:
        _, operator, overload = name.split(".")
        if hasattr(torch.ops.aten, operator) and overload in getattr(torch.ops.aten, operator).overloads():
            key = operator if overload == "default" else f"{operator}_{overload}"
            found[key] = getattr(getattr(torch.ops.aten, operator), overload)
    return found


__all__ = ["module_type"]
