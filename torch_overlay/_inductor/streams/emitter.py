"""Write one plan into the lines of the wrapper that is being generated: events, waits, delayed frees.

While Inductor generates a region, the emitter writes the plan's records and waits between the nodes' lines and marks
which stream each node's lines belong to; `switching` goes over the finished lines. A region costs its caller, per call:
one native call at the entry and one at the exit, which look streams up, record and wait (`streams.runtime.region`), the
records and waits between, and the switches. There is no context manager and no operator of the dispatcher in it.

Note [Memory belongs to the stream that writes it first] A buffer is allocated while the stream of its first writer is
current, as in eager, so the caching allocator and Inductor's own reuse hand a block from one operation of a stream to
the next with no event. A free is delayed until the block's stream is ordered after the last access of any other stream
(`Plan.release`). Where that doesn't happen before the exit, the block is freed there, as eager frees it when the
function returns.
"""

from __future__ import annotations

import os
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen import wrapper as upstream
from torch._inductor.virtualized import V
from torch._library.utils import is_builtin

from torch_overlay import config
from torch_overlay._functorch.streams.fx import is_stream_operator, METHODS_OF_EVENTS, METHODS_OF_STREAMS
from torch_overlay._functorch.streams.ids import callers_device, copy_device, is_copy_stream
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.graph_results import results_are_in_pool
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins, kernel_of, stream_operation
from torch_overlay._inductor.streams.alignment import AlignedInputs
from torch_overlay._inductor.streams.graph_facts import note_owners, users_of_results
from torch_overlay._inductor.streams.plan import ENTRY, Event, HOST
from torch_overlay._inductor.streams.region_names import record_stream_text, RegionNames, root_of
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.single_stream import follows_one_stream_when_idle
from torch_overlay._inductor.streams.switching import BeginRegion, EndRegion, OnStream, StreamLine
from torch_overlay._inductor.user_lines import source_line


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._inductor.streams.planned_region import PlannedRegion


class RegionEmitter(RegionNames):
    """Writes one plan into the lines of the wrapper that is being generated."""

    aligned_inputs: type[AlignedInputs] = AlignedInputs
    may_fold = True  # a call that finds the device idle may keep to one stream

    def __init__(self, scheduler: Scheduler, region: PlannedRegion) -> None:
        self.scheduler = scheduler
        self.wrapper: Any = V.graph.wrapper_code
        super().__init__(root_of(self.wrapper), region)
        if (
            self.may_fold
            and self.device is not None
            and follows_one_stream_when_idle(region, config.fold_branches_below_us)
        ):
            self.keep_to_one_stream_when_idle()
        self.done = ENTRY
        self.pending: list[tuple[int, Callable[[], None]]] = []
        self.node: BaseSchedulerNode | None = None  # the node whose lines are being written
        self.aligned = self.aligned_inputs(self)
        self.unseen = self.unseen_records()

    # -- records and waits

    def write(self, text: str) -> None:
        self.wrapper.writeline(StreamLine(text))

    def write_operation(self, operation: tuple[OperationKind, int, int]) -> None:
        kind, event, stream = operation
        if stream == HOST:
            self.write(self.of_event(event, "synchronize"))
        else:
            self.write(self.if_multi_stream(self.of_event(event, kind.method, stream)))

    def of_event(self, event: int, method: str, *streams: int) -> str:
        """Return a call of a method of an event of the region."""
        return f"{self.event(event)}.{method}({', '.join(map(self.handle, streams))})"

    def write_object_method(self, number: int, method: str, *streams: int) -> None:
        """Write a call of a method of an event of the caller."""
        self.write(f"{self.object(number)}.{method}({', '.join(map(self.stream, streams))})")

    def write_stream_method(self, stream: int, method: str, *streams: int) -> None:
        self.write(f"{self.stream(stream)}.{method}({', '.join(map(self.stream, streams))})")

    def is_callers_state(self, event: Event) -> bool:
        """True if the event stands for what a side stream held when the region was entered: Note [Boundary events under
        the caller's capture].
        """
        return event.after == ENTRY and callers_device(event.stream) is None and self.device is not None

    def records(self, first: int, last: int) -> list[tuple[OperationKind, int, int]]:
        return [(self.kind_of_record(e), e.index, e.stream) for e in self.plan.events if first <= e.after <= last]

    def kind_of_record(self, event: Event) -> OperationKind:
        if event.after != ENTRY or self.device is None:
            return OperationKind.RECORD
        if self.is_callers_state(event):
            return OperationKind.RECORD_ENTRY
        # Note [Streams that hold nothing]. A captured stream can't be asked.
        is_asked = len(event.waits) > 2 and not self.region.enclosed
        return OperationKind.RECORD_BUSY if is_asked else OperationKind.RECORD

    def waits(self, position: int, *, at_entry: bool = False) -> list[tuple[OperationKind, int, int]]:
        """Return the waits before an operation. `at_entry`: those before the first one that are made when the region is
        entered. Later waits stay at their operations: by the time the host gets there, the work that they wait for is
        often done, and the driver has nothing to do for them.
        """
        found = []
        for event, stream in self.plan.waits_before(position):
            kind = OperationKind.WAIT
            if self.is_callers_state(event):
                kind = OperationKind.WAIT_ENTRY
            elif position == len(self.plan.ops) and self.device is not None and callers_device(stream) is None:
                kind = OperationKind.WAIT_EXIT
            if at_entry == (event.after == ENTRY and stream != HOST and position == 0):
                found.append((kind, event.index, stream))
        return found

    def unseen_records(self) -> set[BaseSchedulerNode]:
        """Return the records of the caller's events that nobody outside can see: the region records the event again,
        and nothing between asks for it. Its own waits are for events of its own, and none is for the caller's event
        behind a record of it (`planner`).
        """
        unseen: set[BaseSchedulerNode] = set()
        last: dict[Any, BaseSchedulerNode] = {}
        for node in self.region.index:
            operation: Any = stream_operation(node)
            if operation is not None and operation._opname in METHODS_OF_EVENTS:
                kernel: Any = node.node
                earlier = last.pop(number := kernel.constant_args[0], None)
                if operation._opname == "record_event":
                    last[number] = node
                    if earlier is not None:
                        unseen.add(earlier)
            elif _may_ask(node):
                last.clear()
        return unseen

    def write_boundary_waits(self, position: int) -> None:
        for wait in self.plan.boundary_waits:
            if wait.before == position:
                self.write_object_method(wait.token.index, "wait", wait.stream)

    # -- the region's lines

    def begin(self) -> None:
        self.wrapper.writeline(BeginRegion(self))
        self.entry += self.at_boundary(*self.records(ENTRY, ENTRY), *self.waits(0, at_entry=True))

    def before(self, node: BaseSchedulerNode) -> None:
        """Write what stands between the previous node's lines and this one's: records, waits, frees, and the node's
        stream.
        """
        self.write_back()
        self.node = node
        here = self.region.index[node]
        operations = self.records(max(self.done, 0), here - 1) if here else []
        operations += self.waits(here)
        if operations or any(wait.before == here for wait in self.plan.boundary_waits):
            self.scheduler.flush()
        for operation in operations:
            self.write_operation(operation)
        self.write_boundary_waits(here)
        self.done = here
        self.release(here)
        stream = self.plan.ops[here].stream
        if stream == HOST:
            self.scheduler.flush()
        if stream is not None and stream != HOST:
            device = self.region.devices.get(here, callers_device(stream))
            self.wrapper.writeline(OnStream(self, stream, device, self.range_of(node, stream)))
        elif stream == HOST or node.is_extern():  # on the host, or a call that returns a view
            self.wrapper.writeline(OnStream(self, None, None))

    def range_of(self, node: BaseSchedulerNode, stream: int) -> str:
        """Return the name of the range that profiles show around a node on a side stream, and those that follow it
        there: Note [Names in profiles] of `profiler_ranges`.
        """
        if callers_device(stream) is not None or inductor_config.triton.cudagraphs or config.nvtx is not True:
            return ""
        self.require(profiler_ranges.RUNTIME)
        if is_copy_stream(stream):
            return f"copies to the {'device' if copy_device(stream)[1] else 'host'}"
        lines = [source_line(origin.stack_trace or "") for origin in fx_origins(node)]
        where = [f": {os.path.basename(line.partition(': ')[0])}" for line in lines if line]
        return f"side stream {stream}{min(where, default='')}"

    def write_back(self) -> None:
        """Copy aligned inputs back: Note [Aligned copies and the caller's memory] of `streams.alignment`."""
        if self.aligned.due:
            self.scheduler.flush()
            self.aligned.write_back()

    def end(self) -> None:
        self.write_back()
        last = len(self.plan.ops)
        self.exit += self.at_boundary(*self.records(max(self.done, 0), last), *self.waits(last))
        self.write_boundary_waits(last)
        for name, stream in users_of_results(self.scheduler, self.region):
            self.record_stream(name, stream)
        if not (self.region.enclosed or self.idle_streams):
            note_owners(self.plan)
        self.may_alias = self.find_aliases()
        self.aligned.leave(goes_on=self.region.enclosed)
        self.wrapper.writeline(EndRegion(self))

    def record_stream(self, name: str, stream: int) -> None:
        """Write a `record_stream`, so that the allocator knows that the stream uses a block."""
        self.write(record_stream_text(name, self.stream(stream)))

    def release(self, here: int) -> None:
        due = [free for at, free in self.pending if at <= here]
        self.pending = [(at, free) for at, free in self.pending if at > here]
        for free in due:
            free()

    def free(self, buffer: Any, free: Callable[[], None]) -> None:
        """Free a buffer now, or as soon as the plan allows it. A buffer that may not be freed before the exit is freed
        with the function's locals. `free` writes the lines of a buffer that the wrapper may reuse.
        """
        self.aligned.write_back()
        name = buffer.get_name()
        is_pinned = isinstance(buffer, ir.Buffer) and getattr(buffer.get_output_spec(), "is_pinned", False)
        if is_pinned and self.wrapper.can_free(buffer):
            # A copy to or from the device may still be under way. The allocator of pinned memory knows of the copy; the
            # next host operation, for which the wrapper would reuse the block, does not.
            self.wrapper.freed.add(name)
            self.wrapper.writeline(upstream.FreeLine(self.wrapper, buffer))
            return
        if name in ScheduleNotes.of(self.scheduler).slabs:
            return
        at = self.plan.release.get(name, ENTRY)
        if at <= self.done:
            free()
        elif at < len(self.plan.ops):
            self.pending.append((at, free))

    # -- questions of the code generator

    def may_write_in_place(self, name: str, node: BaseSchedulerNode) -> bool:
        if node not in self.region.index or name in self.plan.release:
            return False
        # Another region may have allocated it on a side stream, as one of the outputs of an operator.
        known = ScheduleNotes.of(self.scheduler).memory or {}
        kernel = kernel_of(V.graph.try_get_buffer(name))
        memory = {self.plan.memory.get(name), known.get(name), known.get(kernel or name, known.get(name))}
        return memory == {self.plan.ops[self.region.index[node]].stream}

    def write_stream_operation(self, node: Any) -> bool:
        """Write the user's records, waits, synchronisations and `record_stream` as direct calls. False: use the
        operator.
        """
        if not is_stream_operator(node.op_overload):
            return False
        kind = node.op_overload._opname
        streams = [self.region.numbers.get(s, s) for s in node.constant_args]
        if kind in METHODS_OF_EVENTS:
            number, streams = node.constant_args[0], streams[1:]
            if kind == "record_event":
                if self.node in self.unseen:
                    return True
                self.recorded[number, self.position(*streams)] = None
            self.write_object_method(number, METHODS_OF_EVENTS[kind], *streams)
        elif kind in METHODS_OF_STREAMS:
            self.write_stream_method(streams[0], METHODS_OF_STREAMS[kind], *streams[1:])
        elif kind == "record_stream":
            tensor = node.codegen_args()[0]
            is_input = tensor in V.graph.graph_inputs
            if not is_input and inductor_config.triton.cudagraphs and results_are_in_pool():
                return True  # the allocator doesn't hand it to others
            if tensor in self.wrapper._alignment_orig_saved:
                tensor = self.aligned.original(tensor)  # the caller's tensor, not the aligned copy of it
            self.record_stream(tensor, streams[-1])
        else:
            return False
        return True


def _may_ask(node: BaseSchedulerNode) -> bool:
    """True for an operation that may look at any event: it asks a stream or an event, is a graph of its own, or runs
    code that isn't PyTorch's.
    """
    operation = stream_operation(node)
    if operation is not None:
        return operation._opname not in (*METHODS_OF_STREAMS, "record_stream")
    operator = getattr(node.node, "op_overload", None)
    if isinstance(operator, torch._ops.OpOverload):
        return not is_builtin(operator)
    return isinstance(node.node, (ir.InvokeSubgraph, ir.Switch, ir.WhileLoop))
