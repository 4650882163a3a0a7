"""Write a plan as C++, for `cpp_wrapper` and AOTInductor.

The plan and its place among the lines are those of Python (`emitter`), and the definition of a region is written out
(`region_spec`): an object of `csrc/generated_region.h` has the events of a call, and each record and wait is a call of
its methods. A switch of the current stream is a guard, which a C++ exception leaves.

    CUstream streams0[2] = {torch_overlay::current_stream(device0)};
    torch_overlay::Frame frame0(events0, device0, 2, streams0[0]);
    const bool is_aliased0 = region0.enter(streams0, 2, device0);
    CUstream stream0_raw = streams0[0], stream1_raw = streams0[1];
    frame0.record(0, stream0_raw);
    ...
    region0.leave(is_aliased0);

Under torch.compile the streams of a call are those of the running graph's table, which Python looks up
(`PythonRegion`). A package of AOTInductor has no caller in Python, and makes its side streams itself (`PackageRegion`):
nobody else knows them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, TYPE_CHECKING

import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_overlay import csrc
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.ids import callers_device, callers_stream_index
from torch_overlay._functorch.streams.tokens import events_of
from torch_overlay._inductor.notes import WrapperNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins
from torch_overlay._inductor.streams.alignment import AlignedInputs
from torch_overlay._inductor.streams.emitter import RegionEmitter
from torch_overlay._inductor.streams.region_names import root_of
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.switching import PlacedKernelCall
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
        self.line = dataclasses.replace(self.line, current_stream_idx=None)  # upstream's number of the stream
        code.writeline_aot(f"{{ auto stream = {self.raw_stream};")  # upstream launches all kernels on this name
        super().codegen(code)
        code.writeline_aot("}")


class CppAlignedInputs(AlignedInputs):
    """Aligned copies in C++, where upstream makes all of them before the call, on the caller's stream."""

    emitter: Any  # a CppRegionEmitter

    def handled(self, checked: Mapping[str, int]) -> set[str]:
        if V.graph.aot_mode:  # upstream's AOTInductor copies them at the entry, and loses what is written there
            V.graph.inputs_to_check = ()
        return set(checked)

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
        self.own_events: dict[int, int] = {}  # of a package, by the user's numbers
        if V.graph.const_module is not None:  # its code is in the same file
            of_constants = WrapperNotes.of(V.graph.const_module.wrapper_code)
            notes = WrapperNotes.of(root_of(V.graph.wrapper_code))
            notes.regions, notes.included = max(notes.regions, of_constants.regions), of_constants.included
        super().__init__(scheduler, region)
        self.number = self.frame.removeprefix("frame")
        if self.device is None:
            self.refuse("streams of several devices")
        if V.graph.name is not None or inductor_config.triton.cudagraphs:
            self.refuse("a nested region")
        self.caller = callers_stream_index(self.device)
        self.definition: Any = None  # the RegionSpec

    def refuse(self, reason: str, node: Any = None) -> NoReturn:
        nodes = [node] if node is not None else list(self.region.index)
        refuse_in_cpp(reason, (origin for each in nodes for origin in fx_origins(each)))

    def before(self, node: BaseSchedulerNode) -> None:
        if isinstance(node.node, ir.InvokeSubgraph):  # upstream's C++ doesn't declare all of its buffers
            self.refuse("a nested region", node)
        if V.graph.aot_mode and any(events_of(fact_of(origin).after or ()) for origin in fx_origins(node)):
            self.refuse("an event of the caller", node)
        super().before(node)

    def range_of(self, node: BaseSchedulerNode, stream: int) -> str:
        return ""  # the functions are Python's

    # -- names and declarations

    def require(self, statement: str) -> None:
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

    def of_event(self, event: int, method: str, *streams: int) -> str:
        method = OperationKind.RECORD.method if method == OperationKind.RECORD_BUSY.method else method
        self.event(event)
        return f"{self.frame}.{method}({', '.join((str(event), *map(self.stream, streams)))})"

    def write_object_method(self, number: int, method: str, *streams: int) -> None:
        if V.graph.aot_mode:
            self.write_own_event(number, method, *streams)
            return
        self.object(number)
        places = [self.position(stream) for stream in streams] or [-1]
        self.write(f'region{self.number}.use_event({number}, "{method}", {places[0]})')

    def write_own_event(self, number: int, method: str, *streams: int) -> None:
        """Write a record of an event in a package, or the host's wait for it; nobody else knows the event."""
        if method == "record":
            self.own_events.setdefault(number, len(self.plan.events) + len(self.own_events))
        elif method != "synchronize" or number not in self.own_events:
            self.refuse("an event of the caller", self.node)
        self.write(self.of_event(self.own_events[number], method, *streams))

    def write_stream_method(self, stream: int, method: str, *streams: int) -> None:
        if method == "synchronize":
            self.write(f"CUDA_DRIVER_CHECK(cuStreamSynchronize({self.stream(stream)}))")
        else:
            self.write(f"{self.frame}.{method}({', '.join(map(self.stream, (stream, *streams)))})")

    def record_stream(self, name: str, stream: int) -> None:
        if V.graph.aot_mode and callers_device(stream) is None:
            return  # the caller's stream waits for it at the exit, and it ends with its thread
        self.include(RECORD_STREAM)
        self.write(f"torch_overlay::record_stream({name}, {self.stream(stream)}, {self.device_name})")

    def switch(self, stream: int, is_guarded: bool) -> str:
        if callers_device(stream) is not None:
            return f"guard{self.number}.reset();"
        return f"guard{self.number}.emplace({self.stream(stream)}, {self.device_name});"

    # -- the definition

    def write_definition(self, spec: RegionSpec) -> None:
        self.definition = spec
        text = ", ".join(f"{name}={getattr(spec, name)}" for name in _LOOKED_UP)
        kind, given = ("PackageRegion", "") if V.graph.aot_mode else ("PythonRegion", f'("{text}")')
        header = self.root.header
        header.writeline(f"static torch_overlay::{kind} region{self.number}{given};")
        header.writeline(f"static thread_local torch_overlay::Events events{self.number};")

    def write_prologue(self, code: Any) -> None:
        if not self.is_entered():
            return
        n, spec, count = self.number, self.definition, len(self.streams)
        events = spec.events + len(self.own_events)
        code.writeline_jit(f"const int {self.device_name} = {self.device};")
        code.writeline_aot(f"const int {self.device_name} = this->device_idx_;")
        code.writeline_jit(f"CUstream streams{n}[{count}] = {{torch_overlay::current_stream({self.device_name})}};")
        code.writeline_aot(f"CUstream streams{n}[{count}] = {{stream}};")
        code.writeline(f"torch_overlay::Frame {self.frame}(events{n}, {self.device_name}, {events}, streams{n}[0]);")
        code.writeline(f"const bool is_aliased{n} = region{n}.enter(streams{n}, {count}, {self.device_name});")
        for stream, position in self.streams.items():
            code.writeline(f"CUstream {self.named(stream)} = streams{n}[{position}];")
        code.writeline(f"std::optional<torch_overlay::AOTICudaStreamGuard> guard{n};")
        for text in self.declarations:
            code.writeline(text)
        self.write_boundary(code, spec.entry)

    def write_boundary(self, code: Any, operations: Any) -> None:
        streams = list(self.streams)
        for kind, event, stream in operations:
            code.writeline(f"{self.of_event(event, OperationKind(kind).method, streams[stream])};")

    def write_epilogue(self, code: Any) -> None:
        if self.is_idle:
            return
        code.writeline(f"guard{self.number}.reset();")
        self.write_boundary(code, self.definition.exit)
        code.writeline(f"region{self.number}.leave(is_aliased{self.number});")
