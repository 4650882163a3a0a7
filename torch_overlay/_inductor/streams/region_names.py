"""Collect the names that the lines of a region use, and write the region's definition, which has numbers for them.

A region looks up streams and events in one call where it is entered, `enter`, which returns those that its lines use:

    frame0, stream1_raw, ev0, = _region0.enter()

So the lines are written first, and each name is noted when it is used. When all are known, the region is defined in the
header of the generated module (`streams.region_spec`). Names of a further region in the same code have its number.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.ids import (
    callers_device,
    callers_stream_index,
    copy_device,
    CURRENT_DEVICE,
    is_copy_stream,
    written_index,
)
from torch_overlay._inductor.notes import WrapperNotes
from torch_overlay._inductor.streams.graph_facts import stream_devices
from torch_overlay._inductor.streams.region_spec import of_device, OperationKind, RegionSpec, ResultKind
from torch_overlay._inductor.streams.switching import PlacedKernelCall


if TYPE_CHECKING:
    from torch_overlay._inductor.streams.planned_region import PlannedRegion
    from torch_overlay._inductor.streams.region_spec import Operation


RUNTIME = "from torch_overlay._inductor.streams.runtime import region, restore_stream, set_stream"


def root_of(wrapper: Any) -> Any:
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    return wrapper


def record_stream_text(name: str, stream: str) -> str:
    """Return a `record_stream` statement, skipped while capturing: memory of a captured graph isn't reused by the
    allocator. Seeds of attention may be in host memory (`relaunch.attention_seeds`).
    """
    conditions = ["not torch.cuda.is_current_stream_capturing()"] * inductor_config.triton.cudagraphs
    buffer = V.graph.try_get_buffer(name)
    if buffer is not None and buffer.maybe_get_dtype() is torch.int64 and buffer.maybe_get_size() == []:
        conditions.append(f"{name}.is_cuda")
    text = f"{name}.record_stream({stream})"
    return f"if {' and '.join(conditions)}: {text}" if conditions else text


class Definition:
    """A region's definition, which grows while its lines are written; streams are given by their numbers in a plan.
    `root`: the wrapper of the whole generated module; `suffix`: of all names.
    """

    def __init__(self, root: Any, name: str, frame: str, suffix: str, device: int | None) -> None:
        self.root, self.name, self.frame, self.suffix, self.device = root, name, frame, suffix, device
        self.streams: dict[int, int] = {}  # in use -> position in the definition
        self.results: dict[str, tuple[int, int]] = {}  # of the names that the lines of the region use
        self.entry: list[Operation] = []
        self.exit: list[Operation] = []
        self.require(RUNTIME)

    def require(self, statement: str) -> None:
        """Import what the lines of the region use."""
        if not self.root.imports.contains(statement):
            self.root.imports.writeline(statement)

    def position(self, stream: int) -> int:
        return self.streams.setdefault(stream, len(self.streams))

    def at_boundary(self, *operations: Operation) -> list[Operation]:
        """Return operations on streams of the plan as the definition has them."""
        return [(kind, event, self.position(stream)) for kind, event, stream in operations]

    # -- names

    def named(self, stream: int) -> str:
        device = callers_device(stream)
        if is_copy_stream(stream):
            index, is_in = copy_device(stream)
            number = "" if index in (0, CURRENT_DEVICE) else index
            return f"stream_{'in' if is_in else 'out'}{number}{self.suffix}"
        if device is None or stream == 0:
            return f"stream{stream}{self.suffix}"
        return f"stream0_cuda{device}{self.suffix}"

    def use(self, name: str, kind: ResultKind, number: int) -> str:
        """Note, and return, a name that `enter` has to return because the region's lines use it."""
        self.results[name] = kind, number
        return name

    def stream(self, stream: int) -> str:
        return self.use(self.named(stream), ResultKind.STREAM, self.position(stream))

    def raw_stream(self, stream: int) -> str:
        return self.use(f"{self.named(stream)}_raw", ResultKind.RAW, self.position(stream))

    def event(self, index: int) -> str:
        return self.use(f"ev{index}{self.suffix}", ResultKind.EVENT, index)

    def object(self, index: int) -> str:
        """Return the name of an event of the caller."""
        return self.use(f"event{index}{self.suffix}", ResultKind.OBJECT, index)

    # -- lines

    def enter(self) -> str:
        return f"{', '.join([self.frame, *self.results])}, = {self.name}.enter()"

    def leave(self) -> str:
        return f"{self.frame}.leave()"

    def define(self, events: int, **fields: Any) -> None:
        numbers = ((s, callers_device(s)) for s in self.streams)
        spec = RegionSpec(
            device=None if self.device is None else written_index(self.device),
            streams=tuple(s if device is None else of_device(written_index(device)) for s, device in numbers),
            events=events,
            entry=tuple(self.entry),
            exit=tuple(self.exit),
            results=tuple(self.results.values()),
            **fields,
        )
        self.write_definition(spec)

    def write_definition(self, spec: RegionSpec) -> None:
        """Write the statement that defines the region into the generated module's header; empty fields are left
        out.
        """
        streams = [self.named(s) for s in self.streams]

        def of_operations(operations: tuple[Operation, ...]) -> list[str]:
            return [f"{OperationKind(k).method} ev{e}{self.suffix} {streams[s]}" for k, e, s in operations]

        comments = {
            "streams": streams,
            "entry": of_operations(spec.entry),
            "exit": of_operations(spec.exit),
            "results": self.results,
            "distinct": [streams[s] for s in spec.distinct],
            "idle_streams": [streams[s] for s in spec.idle_streams or ()],
            "waits_again": [f"event{e}{self.suffix}" for e in spec.waits_again],
            "records_again": [f"event{e}{self.suffix} {streams[s]}" for e, s in spec.records_again],
        }
        self.root.header.writeline(f"{self.name} = region(")
        for field in dataclasses.fields(spec):
            if (value := getattr(spec, field.name)) != field.default:
                names = ", ".join(comments.get(field.name, ()))
                self.root.header.writeline(f"    {field.name}={value},{names and f'  # {names}'}")
        self.root.header.writeline(")")


class RegionNames(Definition):
    """The definition of a planned region."""

    kernel_call: type[PlacedKernelCall] = PlacedKernelCall
    restores_streams = True  # by a statement of its own

    def __init__(self, root: Any, region: PlannedRegion) -> None:
        self.region, self.plan = region, region.plan
        notes = WrapperNotes.of(root)
        number, notes.regions = notes.regions, notes.regions + 1
        self.recorded: dict[tuple[int, int], None] = {}  # the caller's events that the region records, and where
        self.may_alias: list[int] = []
        self.idle_streams: list[int] = []  # the side streams, if calls that find the device idle keep to one stream
        self.is_defined = False
        devices = {*region.devices.values(), *(d for s in self.plan.streams if (d := callers_device(s)) is not None)}
        known = stream_devices()
        devices |= {known[s] for s in self.plan.streams if s in known and callers_device(s) is None}
        # Events of one device take raw handles; what crosses devices goes through torch.Event and stream objects.
        if not devices and V.graph.cpp_wrapper:  # a region of synchronisation alone
            devices.add(torch.accelerator.current_device_index())
        device: int | None = devices.pop() if len(devices) == 1 else None
        super().__init__(root, f"_region{number}", f"frame{number}", f"_{number}" if number else "", device)
        if device is not None:
            self.position(callers_stream_index(device))

    def handle(self, stream: int) -> str:
        """Return the name that an event of this region takes for a stream: of the raw handle if there is one device,
        else of the stream.
        """
        return self.stream(stream) if self.device is None else self.raw_stream(stream)

    # -- calls that keep to one stream

    def keep_to_one_stream_when_idle(self) -> None:
        """Have calls that find the device idle run on the caller's stream alone: Note [Streams can't pay on an idle
        device] of `streams.single_stream`.
        """
        self.idle_streams = [s for s in self.plan.streams if callers_device(s) is None]
        self.use(self.multi_stream, ResultKind.MULTI_STREAM, 0)

    @property
    def multi_stream(self) -> str:
        """The variable that says if a call uses the side streams."""
        return f"multi_stream{self.suffix}"

    def if_multi_stream(self, text: str) -> str:
        """Return a statement that only a call that uses the side streams runs."""
        return f"if {self.multi_stream}: {text}" if self.idle_streams else text

    def stream_of_call(self, stream: int) -> str:
        """Return the stream on which a call does the work of a stream: None, the current one, where it keeps to one."""
        name = self.stream(stream)
        return f"{name} if {self.multi_stream} else None" if self.idle_streams else name

    # -- the definition

    def find_aliases(self) -> list[int]:
        """Return the streams that could turn out to be one in some call: the caller's current stream and the user's
        streams.
        """
        if self.region.enclosed or self.device is None:
            return []
        theirs = [s for s in self.streams if callers_device(s) is None and s not in self.region.private]
        theirs = [s for s in theirs if not is_copy_stream(s)]
        return [callers_stream_index(self.device), *theirs] if theirs else []

    @property
    def is_idle(self) -> bool:
        """True if nothing is looked up, recorded or waited for."""
        return not (self.results or self.entry or self.exit or self.may_alias)

    def is_entered(self) -> bool:
        """Define the region, all of whose lines are known by now. False: there is nothing to enter."""
        if not (self.is_idle or self.is_defined):
            self.is_defined = True
            idle = tuple(self.position(s) for s in self.idle_streams if s not in self.region.private)
            self.define(
                events=max(len(self.plan.events), 1 if self.idle_streams else 0),
                distinct=tuple(map(self.position, self.may_alias)),
                idle_streams=idle if self.idle_streams else None,
                waits_again=tuple(w.token.index for w in self.plan.boundary_waits if self.may_alias),
                records_again=tuple(self.recorded if self.may_alias else ()),
            )
        return not self.is_idle

    def write_prologue(self, code: Any) -> None:
        if self.is_entered():
            code.writeline(self.enter())

    def write_epilogue(self, code: Any) -> None:
        if not self.is_idle:
            code.writeline(self.leave())

    # -- the current stream

    def switch(self, stream: int, is_guarded: bool) -> str:
        """Return the statement that makes a stream the current one. Without a guard the device must stay as it is."""
        return self.if_multi_stream(f"{'set_stream' if is_guarded else 'restore_stream'}({self.stream(stream)})")
