"""Run generated code on the simulated device: execute the unchanged text of a wrapper.

The wrapper's own Python runs: allocations, deletions, reuse, partitions, the region's entry and exit, extern kernels,
operators. Each Triton or C++ kernel is replaced by a function that notes which arguments the kernel reads and which it
writes, by Inductor's names (`in_ptr`, `out_ptr`, `in_out_ptr`), `mutated_arg_names` and the stores in its source, and
which elements of the arguments (`kernel_ranges`). A user's kernel that stores through computed pointers is taken to
write through every pointer. The native region, the boundary of generated code, is one on the simulated device's streams
and events; nothing is captured, so the events for a caller's capture are ordinary ones.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import types
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

from torch_overlay._inductor.streams import runtime as stream_runtime
from torch_overlay._inductor.streams.runtime import EventRegion
from torch_overlay.analysis.race_check.kernel_ranges import HostKernelRanges, KernelRanges
from torch_overlay.analysis.race_check.trace import ByteSpan, HOST, View


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch_overlay._inductor.streams.region_spec import RegionSpec
    from torch_overlay.analysis.race_check.kernel_ranges import Elements
    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice


class SimulatedEvent:
    """Replacement for `events.Event` of the C module: the lines of a region give it raw handles."""

    def __init__(self, region: SimulatedRegion) -> None:
        self.region, self.index = region, region.spec.device or 0
        self.event = torch.Event(device=torch.device("cuda", self.index))
        self.idle = False

    def _stream(self, stream: torch.cuda.Stream | int) -> torch.cuda.Stream:
        if isinstance(stream, torch.cuda.Stream):
            return stream
        if stream == 0:
            return torch.cuda.default_stream(self.index)
        return torch.cuda.ExternalStream(stream, device=self.index)

    def record(self, stream: torch.cuda.Stream | int) -> None:
        self.idle = False
        self.event.record(self._stream(stream))

    def record_busy(self, stream: torch.cuda.Stream) -> None:
        if self.region.are_idle([stream]):
            self.idle = True
        else:
            self.record(stream)

    def wait(self, stream: torch.cuda.Stream | int) -> None:
        if not self.idle:
            self.event.wait(self._stream(stream))

    wait_entry = wait

    def synchronize(self) -> None:
        self.event.synchronize()


class SimulatedRegion(EventRegion):
    def __init__(self, device: SimulatedDevice, spec: RegionSpec) -> None:
        super().__init__(spec)
        self.device = device

    def make_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def are_idle(self, streams: Iterable[torch.cuda.Stream]) -> bool:
        self.device.asked_idle = True
        return self.device.idle and super().are_idle(streams)


class CheckError(RuntimeError):
    """Raised if the program, or the code generated for it, can't run on the simulated device."""


class Module:
    """A generated module that runs on the simulated device."""

    def __init__(self, device: SimulatedDevice, text: str, number: int) -> None:
        self.device, self.number = device, number
        self.original = text
        self._lines: Sequence[str] | None = None
        self.scope: dict[str, Any] = {}
        self.text = text if device.rewrite is None else device.rewrite(text)
        self.load(self.text)

    def load(self, text: str) -> None:
        source = text.replace("async_compile = AsyncCompile()", "async_compile = _simulated")
        self.scope = {
            "_simulated": _Kernels(self.device),
            "_module": self,
            "_lines": source.splitlines(),
            "__name__": f"wrapper {self.number}",
        }
        with self.device.pause():
            exec(compile(source, f"<wrapper {self.number}>", "exec"), self.scope)
        self.scope.update(_stand_ins(self.device))
        if (runner := self.scope.get("runner")) is not None:
            runner.partitions = [self._partition(call) for call in runner.partitions]

    def _partition(self, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def run(args: list[Any]) -> Any:
            with self.device.partition():
                return call(args)

        return run

    def user_line(self, number: int) -> str:
        """Return the user's lines of a line of the text."""
        if self._lines is None:
            regions = self.device.seen.regions if self.device.seen is not None else ()
            self._lines = _carried(next((r.lines for r in regions if r.wrapper == self.original), ()), self)
        return self._lines[number - 1]

    def call(self, args: list[Any]) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        try:
            return self.scope["call"](args)
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise CheckError(f"generated code depends on data, which isn't there: {e}") from e


def _carried(lines: Sequence[str], module: Module) -> Sequence[str]:
    """Return lines of the module's original for the text that runs, from which `rewrite` may have taken some."""
    rows, originals = module.text.split("\n"), module.original.split("\n")
    found = [""] * len(rows)
    if lines:
        for first, second, count in difflib.SequenceMatcher(None, originals, rows, False).get_matching_blocks():
            found[second : second + count] = lines[first : first + count]
    return found


def execute(device: SimulatedDevice, text: str, stub: Any, module_type: type[Module] = Module) -> Any:
    """Return the module that Inductor gets in place of a stub."""
    module = module_type(device, text, len(device.modules))
    device.modules.append(module)

    def recursively_apply_fns(fns: Sequence[Callable[[Any], Any]]) -> None:
        for fn in fns:
            fn(module.call)

    return types.SimpleNamespace(
        call=module.call,
        __file__=stub.__file__,
        recursively_apply_fns=recursively_apply_fns,
        runner=types.SimpleNamespace(partitions=[], recursively_apply_fns=recursively_apply_fns),
    )


class _Kernels:
    """Replacement for `async_compile` in a generated module."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device

    def wait(self, scope: Any) -> None:
        pass

    def triton(self, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        return _Triton(self.device, name, source)

    def multi_kernel(self, name: str, kernels: Sequence[_Triton], *args: Any, **kwargs: Any) -> Any:
        return kernels[0]  # one of several that compute the same

    def cpp_pybinding(self, kinds: Sequence[str], source: str, *args: Any, **kwargs: Any) -> Callable[..., None]:
        ranges = HostKernelRanges(source)
        parameters = re.findall(r"\b(\w+)(?:,|\))", source.partition("kernel(")[2].partition("\n{")[0])

        def run(*values: Any) -> None:
            given = [row for row in zip(parameters, values, kinds) if isinstance(row[1], torch.Tensor)]
            launch_on_host(self.device, ranges, ((name, tensor, "const" not in kind) for name, tensor, kind in given))

        return run

    def __getattr__(self, name: str) -> Any:
        raise CheckError(f"kernels by `async_compile.{name}` can't be simulated: nothing says what they read and write")


class _Triton:
    def __init__(self, device: SimulatedDevice, name: str, source: str) -> None:
        self.device, self.name = device, name
        signature = re.search(rf"def {re.escape(name)}\((.*?)\):", source, re.DOTALL) or re.search(
            r"@triton\.jit\s+def \w+\((.*?)\):", source, re.DOTALL
        )
        if signature is None:
            raise CheckError(f"the source of {name} has no function of that name")
        self.parameters = [p.split(":")[0].split("=")[0].strip() for p in signature[1].split(",")]
        mutated = re.search(r"'mutated_arg_names': \[([^]]*)\]", source)
        stored = re.findall(r"tl\.(?:store|atomic_\w+)\(\s*(\w+)", source)
        self.written = {*re.findall(r"'(\w+)'", mutated[1] if mutated else ""), *stored}
        named = {p for p in self.parameters if p in self.written or "out_ptr" in p}
        # If nothing else is known of a kernel, its stores through computed pointers may go anywhere.
        self.anywhere = not named and bool(stored)
        self.ranges = KernelRanges(source)
        hints = re.findall(r"\((\d+),\): \[\['tt.divisibility', 16\]\]", source)
        self.aligned = {self.parameters[int(i)] for i in hints if int(i) < len(self.parameters)}

    def run(self, *values: Any, stream: int, **kwargs: Any) -> None:
        given = dict(zip(self.parameters, values)) | kwargs
        numbers = {name: value for name, value in given.items() if type(value) is int}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        reads, writes = [], []
        for parameter, value in tensors.items():
            written = self.anywhere or parameter in self.written or "out_ptr" in parameter
            if written:
                writes += _touched(self.device, value, self.ranges.of(parameter, "store", numbers))
            if not written or not re.fullmatch(r"out_ptr\d+", parameter):
                reads += _touched(self.device, value, self.ranges.of(parameter, "load", numbers))
            if parameter in self.aligned:
                self.device.expect_aligned(value, self.name)
        on_device = next((t for t in tensors.values() if t.is_cuda), None)
        index = torch._C._accelerator_getDeviceIndex() if on_device is None else on_device.device.index or 0
        self.device.launch(self.name, self.device.stream_name(stream, index), reads, writes)


def launch_on_host(
    device: SimulatedDevice, ranges: HostKernelRanges, given: Iterable[tuple[str, torch.Tensor, bool]]
) -> None:
    """Launch a C++ kernel; for each parameter, `given` has its name, its tensor, and if the kernel may write to it."""
    reads, writes = [], []
    for parameter, tensor, is_written in given:
        (writes if is_written else reads).extend(_touched(device, tensor, ranges.elements(parameter)))
    device.launch("C++ kernel", HOST, [*reads, *writes], writes)


def _touched(device: SimulatedDevice, tensor: torch.Tensor, found: list[Elements] | None) -> list[Any]:
    """Return the views of elements that a kernel touches, or the whole tensor if they aren't known."""
    if found is None or not tensor.numel():
        return [tensor]
    item, first = tensor.element_size(), int(tensor.storage_offset())
    memory = device.memory(tensor)
    return [
        View(memory, ByteSpan((first + e.offset) * item, e.sizes, tuple(s * item for s in e.strides), item))
        for e in found
    ]


def _strided(device: str, pinned: bool = False) -> Callable[..., torch.Tensor]:
    def make(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        where = f"cuda:{torch._C._accelerator_getDeviceIndex()}" if device == "cuda" else device
        return torch.empty_strided(size, stride, dtype=dtype, device=where, pin_memory=pinned)

    return make


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    """Return the same memory with another layout, hidden from autograd: outputs that are views have other rules."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _alloc_from_pool(pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Any, stride: Any) -> torch.Tensor:
    return pool.view(torch.uint8)[offset:].view(dtype).as_strided(size, stride, offset // dtype.itemsize)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _stand_ins(device: SimulatedDevice) -> dict[str, Any]:
    """Return replacements for functions that generated code calls: C functions below the dispatcher, and functions that
    read addresses or pin host memory.
    """

    def copy(tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return tensor.clone() if device.misaligned else tensor

    return {
        "empty_strided_cuda": _strided("cuda"),
        "empty_strided_cpu": _strided("cpu"),
        "empty_strided_cpu_pinned": _strided("cpu", True),
        "reinterpret_tensor": _reinterpret,
        "alloc_from_pool": _alloc_from_pool,
        "copy_if_misaligned": copy,
        "aligned": copy,
        "assert_size_stride": _ignore,
        "assert_size_stride_grouped": _ignore,
        "assert_alignment": _ignore,
        "assert_tensor_metadata": _ignore,
        # Host memory for saved activations: the same in every call, as if only one forward is alive at a time.
        "take_slab": device.take_slab,
        "note_use": _ignore,
    }


@contextlib.contextmanager
def runtime(device: SimulatedDevice) -> Iterator[None]:
    """Simulate regions, and the user's Triton kernels and Inductor's input copies outside of them."""

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch a user's kernel outside of compiled code."""
        if device.is_listening() and not warmup:
            given = dict(zip(kernel.arg_names, args)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
            name = kernel.fn.__name__
            stream = torch._C._cuda_getCurrentRawStream(torch._C._accelerator_getDeviceIndex())
            _Triton(device, name, kernel.src).run(**given, stream=stream)

    def realign(inputs: list[Any], indices: Sequence[int], mutated: Any = ()) -> tuple[list[Any], list[Any]]:
        """Copy misaligned inputs, as upstream does around a call of generated code."""
        given = {i: inputs[i] for i in indices if device.misaligned}
        for i, tensor in given.items():
            inputs[i] = tensor.clone()
        written = [i for i in given if i in (mutated or ())]
        return [given[i] for i in written], [inputs[i] for i in written]

    with (
        mock.patch("torch._inductor.utils.copy_misaligned_inputs", realign),
        mock.patch("triton.runtime.jit.JITFunction.run", launch),
        mock.patch.object(stream_runtime, "native_region", functools.partial(SimulatedRegion, device)),
    ):
        yield


__all__ = ["SimulatedRegion", "CheckError", "Module"]
