"""Write a plan as C++, for `cpp_wrapper` and AOTInductor.

The plan and its place among the lines are those of Python (`emitter`), and the definition of a region is written out
(`region_spec`): an object of `csrc/generated_region.h` has the events of a call, and each record and wait is a call of
its methods. A switch of the current stream is a guard, which a C++ exception leaves.

    CUstream streams0[2];
    const bool is_aliased0 = region0.enter(streams0, 2);
    CUstream stream0_raw = streams0[0], stream1_raw = streams0[1];
    torch_overlay::Frame frame0(events0, device0, 2, stream0_raw);
    frame0.record(0, stream0_raw);
    ...
    region0.leave(is_aliased0);

Under torch.compile the streams of a call are those of the running graph's table, which Python looks up
(`streams.runtime.CppRegion`). Code of AOTInductor has no caller in Python: its side streams are made once for each
thread and device by upstream's `AOTIPerThreadStreamCache`, and nobody else knows them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_overlay import csrc
from torch_overlay._functorch.streams.ids import callers_device, callers_stream_index, is_copy_stream
from torch_overlay._inductor.notes import WrapperNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins
from torch_overlay._inductor.streams.alignment import AlignedInputs
from torch_overlay._inductor.streams.emitter import RegionEmitter
from torch_overlay._inductor.streams.plan import HOST
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.wrapper_lines import PlacedKernelCall
from torch_overlay._inductor.user_lines import refuse_in_cpp


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
    from torch._inductor.utils import IndentedBuffer

    from torch_overlay._inductor.streams.planned_region import PlannedRegion
    from torch_overlay._inductor.streams.region_spec import RegionSpec

_LOOKED_UP = "device", "streams", "distinct", "waits_again", "records_again"  # by Python
RUNTIME = "generated_region.h"
RECORD_STREAM = "generated_record_stream.h"  # has headers of ATen, which take long to compile


@dataclasses.dataclass
class CppKernelCall(PlacedKernelCall):
    def codegen(self, code: IndentedBuffer) -> None:
        wrapper: Any = self.line.wrapper
        calls = wrapper.wrapper_call
        written = (calls.aot if V.graph.is_dual_wrapper_mode else calls)._lines
        first = len(written)
        self.line = dataclasses.replace(self.line, current_stream_idx=None)  # upstream's number of the stream
        super().codegen(code)
        # Upstream's AOTInductor launches the kernels of all streams on the caller's.
        for i, line in enumerate(written[first:], first):
            if isinstance(line, str):
                written[i] = line.replace(", stream, kernels, ", f", {self.raw_stream}, kernels, ")


class CppAlignedInputs(AlignedInputs):
    """Aligned copies in C++, where upstream makes all of them before the call, on the caller's stream."""

    emitter: Any  # a CppRegionEmitter

    def handled(self, checked: Mapping[str, int]) -> set[str]:
        # AOTInductor copies at the entry: nobody but the caller's stream can have written its inputs.
        return set() if V.graph.aot_mode else set(checked)

    def call(self, function: str, name: str, *more: str) -> str:
        return f"torch_overlay::{function}({', '.join([name, f'{name}_orig', *more])})"

    def place(self) -> tuple[str, str]:
        return self.emitter.stream(self.stream), self.emitter.device_name

    def write_name(self, name: str) -> None:
        self.emitter.declare(f"RAIIAtenTensorHandle {name}_orig;")

    def write_copy(self, name: str) -> None:
        self.emitter.write(self.call("align", name, *self.place()))

    def write_copy_back(self, name: str) -> None:
        self.emitter.write(self.call("write_back", name, *self.place()))

    def write_original(self, name: str) -> None:
        self.emitter.write(self.call("restore", name))

    write_original_alone = write_original

    def original(self, name: str) -> str:
        return f"({name}_orig.get() ? {name}_orig : {name})"

    def write_leaving_copy(self, name: str) -> None:
        self.emitter.record_stream(name, self.emitter.caller)

    def shown(self, name: str) -> str:
        self.emitter.write(f"RAIIAtenTensorHandle {name}_shown = {self.call('shown', name)}")
        return f"{name}_shown"


class CppRegionEmitter(RegionEmitter):
    """Writes one plan into the lines of a C++ wrapper."""

    aligned_inputs = CppAlignedInputs
    kernel_call = CppKernelCall
    may_fold = False
    restores_streams = False  # the guard does

    def __init__(self, scheduler: Scheduler, region: PlannedRegion) -> None:
        self.declarations: list[str] = []
        super().__init__(scheduler, region)
        self.number = self.frame.removeprefix("frame")
        if self.device is None:
            self.refuse("streams of several devices")
        if region.enclosed:
            self.refuse("a nested region")
        self.caller = callers_stream_index(self.device)
        self.definition: Any = None  # the RegionSpec

    def refuse(self, reason: str, node: Any = None) -> NoReturn:
        nodes = [node] if node is not None else list(self.region.index)
        refuse_in_cpp(reason, (origin for each in nodes for origin in fx_origins(each)))

    def before(self, node: BaseSchedulerNode) -> None:
        if isinstance(node.node, ir.InvokeSubgraph):  # upstream's C++ doesn't declare all of its buffers
            self.refuse("a nested region", node)
        super().before(node)

    def range_of(self, node: BaseSchedulerNode, stream: int) -> str:
        return ""  # the functions are Python's

    # -- names and declarations

    def require(self, statement: str) -> None:
        if V.graph.aot_mode:
            self.root._ensure_aoti_stream_helpers_emitted()
        self.include(RUNTIME)

    def include(self, name: str) -> None:
        included = WrapperNotes.of(self.root).included
        if name not in included:
            included.add(name)
            self.root.header.splice((csrc.FOLDER / name).read_text())

    def named(self, stream: int) -> str:
        return f"{super().named(stream)}_raw"

    def raw_stream(self, stream: int) -> str:
        return self.stream(stream)

    @property
    def device_name(self) -> str:
        return f"device{self.number}"

    def declare(self, text: str) -> None:
        self.declarations.append(text)

    # -- statements

    def write(self, text: str) -> None:
        super().write(f"{text};")

    def operation(self, kind: OperationKind, event: int, stream: str) -> str:
        method = OperationKind.RECORD if kind == OperationKind.RECORD_BUSY else kind
        return f"{self.frame}.{method.method}({event}, {stream})"

    def write_operation(self, operation: tuple[OperationKind, int, int]) -> None:
        kind, event, stream = operation
        self.event(event)
        if stream == HOST:
            self.write(f"{self.frame}.synchronize({event})")
        else:
            self.write(self.operation(kind, event, self.stream(stream)))

    def write_object_method(self, number: int, method: str, *streams: int) -> None:
        if V.graph.aot_mode:
            self.refuse("an event of the caller", self.node)
        self.object(number)
        places = [self.position(stream) for stream in streams] or [-1]
        self.write(f'region{self.number}.use_event({number}, "{method}", {places[0]})')

    def write_stream_method(self, stream: int, method: str, *streams: int) -> None:
        if method == "synchronize":
            self.write(f"CUDA_DRIVER_CHECK(cuStreamSynchronize({self.stream(stream)}))")
        else:
            self.write(f"{self.frame}.{method}({', '.join(map(self.stream, (stream, *streams)))})")

    def record_stream(self, name: str, stream: int) -> None:
        self.include(RECORD_STREAM)
        self.write(f"torch_overlay::record_stream({name}, {self.stream(stream)}, {self.device_name})")

    def switch(self, stream: int, is_guarded: bool) -> str:
        if callers_device(stream) is not None:
            return f"guard{self.number}.reset();"
        return f"guard{self.number}.emplace({self.stream(stream)}, {self.device_name});"

    # -- the definition

    def write_definition(self, spec: RegionSpec) -> None:
        self.definition = spec
        if V.graph.aot_mode:  # the code that tunes kernels for AOTInductor runs on the current stream
            spec = dataclasses.replace(spec, streams=spec.streams[:1] * len(spec.streams), distinct=())
        text = ", ".join(f"{name}={getattr(spec, name)}" for name in _LOOKED_UP)
        header = self.root.header
        header.writeline_jit(f'static torch_overlay::PythonRegion region{self.number}("{text}");')
        header.writeline(f"static thread_local torch_overlay::Events events{self.number};")

    def write_prologue(self, code: Any) -> None:
        if not self.prologue():
            return
        n, spec, device = self.number, self.definition, self.device
        code.writeline_jit(f"const int {self.device_name} = {device};")
        code.writeline_jit(f"CUstream streams{n}[{len(self.streams)}];")
        code.writeline_jit(f"const bool is_aliased{n} = region{n}.enter(streams{n}, {len(self.streams)});")
        code.writeline_aot(f"const int {self.device_name} = this->device_idx_;")
        for stream, position in self.streams.items():
            code.writeline_jit(f"CUstream {self.named(stream)} = streams{n}[{position}];")
            code.writeline_aot(f"CUstream {self.named(stream)} = {self.found_by_aot(stream)};")
        caller = self.named(self.caller)
        code.writeline(f"torch_overlay::Frame {self.frame}(events{n}, {self.device_name}, {spec.events}, {caller});")
        code.writeline(f"std::optional<torch_overlay::AOTICudaStreamGuard> guard{n};")
        for text in self.declarations:
            code.writeline(text)
        self.write_boundary(code, spec.entry)

    def found_by_aot(self, stream: int) -> str:
        if callers_device(stream) is not None:
            return "stream"
        if is_copy_stream(stream):
            self.refuse("copies of saved activations")
        return f"_aoti_aux_stream_cache.get({stream}, this->device_idx_, stream)"

    def write_boundary(self, code: Any, operations: Any) -> None:
        names = [self.named(stream) for stream in self.streams]
        for kind, event, stream in operations:
            code.writeline(f"{self.operation(OperationKind(kind), event, names[stream])};")

    def write_epilogue(self, code: Any) -> None:
        if self.is_idle:
            return
        code.writeline(f"guard{self.number}.reset();")
        self.write_boundary(code, self.definition.exit)
        code.writeline_jit(f"region{self.number}.leave(is_aliased{self.number});")


__all__ = ["CppRegionEmitter"]
