"""Enter and leave a region with streams: the functions that generated code calls at run time.

    frame0, stream1_raw, = _region0.enter()
    ...
    frame0.leave()

`enter` looks the streams up, records and waits as the region's definition says (`streams.region_spec`), in its order,
and returns the frame of this call and the streams and events that the code between uses; `leave` records and waits at
the exit. Events belong to the compiled module: a call takes a frame, with a set of events, and returns it when it
leaves, so two threads, or a call inside a call, never share a frame; the frame of a call that raises is
garbage-collected. The device -1 is the one that is current at a call: Note [Compiled on one rank] of `streams.ids`.

On one device a region and its events are C (`csrc/region.c`, `csrc/events.c`), which take the raw handles of streams
that generated code has anyway: `torch.Event.record` costs 0.55 us of host time, of which the driver's share is a third,
and a fork and a join of eight streams is 25 such calls. Such an event orders streams of its device; one that crosses
devices is a torch.Event (`EventRegion`).

Note [Boundary events under the caller's capture]
When the caller captures a CUDA graph, a stream is part of the capture from the moment at which it waits for a captured
stream. Work that another stream held before that is no part of the graph, and waiting for it would end the capture:
such a wait is skipped (`record_entry`, `wait_entry`). And a stream that is made to wait for the caller's stream when
the region is left would be part of the capture and never joined: it is joined at once (`wait_exit`), so that it is in
the state in which eager leaves a stream that was forked and joined.

Note [Streams that hold nothing]
Where several streams wait for what the caller's stream held at the entry, `record_busy` asks first whether it holds
anything at all. If the device waits for its host, the stream holds nothing, and there is nothing to record and to wait
for. A kernel after a wait costs the host about a microsecond more than one without. The query itself costs as much for
a stream that has just become idle, so a side stream is not queried: a record and a wait are cheaper.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import torch
from torch._C._dynamo.guards import copy_if_misaligned

from torch_overlay import csrc
from torch_overlay._dynamo import objects
from torch_overlay._dynamo.objects import callers_stream, get as get_object, Owned
from torch_overlay._functorch.offload.runtime import copy_stream
from torch_overlay._functorch.streams.ids import CURRENT_DEVICE, index_now, is_copy_stream
from torch_overlay._inductor.streams.region_spec import of_device, OperationKind, RegionSpec, ResultKind


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_overlay._inductor.streams.region_spec import Operation


ALIGNMENT = 16  # bytes: the alignment of inputs that Inductor assumes

set_stream = torch._C._accelerator_setStream
"""Make a stream the current one of its device, and its device the current one: inside that device's guard this changes
no device.
"""


def restore_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device, and leave the current device alone."""
    device = torch._C._cuda_getDevice()
    set_stream(stream)
    if device != stream.device_index:
        torch._C._cuda_setDevice(device)


def aligned(tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
    """Return the tensor, or an aligned copy of it that is made on the stream. A stream of None, which code passes where
    a call keeps to the caller's stream, is the current one.
    """
    if not tensor.data_ptr() % ALIGNMENT:
        return tensor
    with torch.cuda.stream(stream):
        return copy_if_misaligned(tensor)


def write_back(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Copy what was written to an aligned copy into the caller's memory, on the stream, or on the current one."""
    with torch.cuda.stream(stream):
        target.copy_(source)


def resolve(found: Any) -> Any:
    """Return what an entry of a graph's table stands for: a torch.cuda.Stream, or an event."""
    if type(found) is Owned:
        found = found.resolve()
    elif type(found) is int:
        return copy_stream(found)
    return objects.as_cuda_stream(found) if type(found) is torch.Stream else found


def align(*streams: torch.Stream) -> None:
    """Order all the streams after one another.

    Note [Streams that turn out to be one]
    The plan assumes that the user's streams differ from each other and from the caller's current stream, as they did
    when the function was compiled. Where two of them are one stream in some call, an order that holds for one has to
    hold for the other: such a call orders all of them fully at its entry and exit instead.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


def find_stream(stream: int) -> Any:
    """Return the stream that a number of `RegionSpec.streams` stands for in this call."""
    if stream < 0:
        return callers_stream(of_device(stream))
    return resolve(stream if is_copy_stream(stream) else get_object(stream))


def order_aliased(spec: RegionSpec, entering: bool) -> None:
    """Order the streams of a call in which two of them are one: Note [Streams that turn out to be one]."""
    align(*(find_stream(spec.streams[stream]) for stream in spec.distinct))
    again = [(event, spec.distinct[0]) for event in spec.waits_again] if entering else spec.records_again
    for number, stream in again:
        event = resolve(get_object(number))
        (event.wait if entering else event.record)(find_stream(spec.streams[stream]))


class EventFrame:
    """One call of an `EventRegion`."""

    def __init__(self, region: EventRegion) -> None:
        self.region = region
        self.events = [region.make_event() for _ in range(region.spec.events)]
        self.streams: list[Any] = []
        self.is_aliased = False
        self.multi_stream = True

    def enter(self) -> tuple[Any, ...]:
        spec = self.region.spec
        self.streams = [find_stream(stream) for stream in spec.streams]
        self.is_aliased = len({self.streams[i].cuda_stream for i in spec.distinct}) < len(spec.distinct)
        if self.is_aliased:
            order_aliased(spec, True)
        may_follow = spec.idle_streams is not None and self.region.are_idle(
            [self.streams[i] for i in (0, *spec.idle_streams)]
        )
        self.multi_stream = self.is_aliased or not may_follow
        if self.multi_stream:
            self.run(spec.entry)
        return self, *(self.result(kind, number) for kind, number in spec.results)

    def run(self, operations: Iterable[Operation]) -> None:
        for kind, event, stream in operations:
            if kind == OperationKind.RECORD_BUSY:
                self.events[event].record_busy(self.streams[stream])
            elif kind < OperationKind.WAIT:
                self.events[event].record(self.streams[stream])
            else:
                self.events[event].wait(self.streams[stream])

    def result(self, kind: int, number: int) -> Any:
        if kind == ResultKind.MULTI_STREAM:
            return self.multi_stream
        if kind == ResultKind.OBJECT:
            return resolve(get_object(number))
        if kind == ResultKind.EVENT:
            return self.events[number]
        if kind == ResultKind.RAW:
            return self.streams[number if self.multi_stream else 0].cuda_stream
        return self.streams[number]

    def leave(self) -> None:
        spec = self.region.spec
        self.run(spec.exit if self.multi_stream else spec.exit_alone)
        self.streams = []
        if self.is_aliased:
            order_aliased(spec, False)
        self.region.frames.append(self)  # from here on another thread may take it


class EventRegion:
    """A region in Python, with torch.Event, which orders streams of several devices."""

    def __init__(self, spec: RegionSpec) -> None:
        self.spec = spec
        self.frames: list[EventFrame] = []

    def make_event(self) -> Any:
        return torch.Event(device="cuda")

    def are_idle(self, streams: Iterable[Any]) -> bool:
        return all(stream.query() for stream in streams)

    def enter(self) -> tuple[Any, ...]:
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = EventFrame(self)
        return frame.enter()


def native_region(spec: RegionSpec) -> Any:
    """Make the region of one device, in C. Raises `csrc.NotBuiltError`."""
    return csrc.extension().events.Region(
        spec,
        objects._thread,
        torch.cuda.Stream,
        torch._C._cuda_getCurrentRawStream,
        callers_stream,
        resolve,
        functools.partial(order_aliased, spec),
    )


class Region:
    """A region of a generated module. The native module is built at the first call, not when the module is loaded."""

    def __init__(self, **fields: Any) -> None:
        self.spec = RegionSpec(**fields)
        self.enter: Callable[[], tuple[Any, ...]] = self._enter_first
        self._of_device: dict[int, Any] = {}

    def _enter_first(self) -> tuple[Any, ...]:
        if self.spec.device == CURRENT_DEVICE:
            self.enter = self._enter_here
        else:
            self.enter = (EventRegion if self.spec.device is None else native_region)(self.spec).enter
        return self.enter()

    def _enter_here(self) -> tuple[Any, ...]:
        """Enter the region of the device that is current: its events are that device's."""
        device = index_now(CURRENT_DEVICE)
        region = self._of_device.get(device)
        if region is None:
            region = self._of_device[device] = native_region(dataclasses.replace(self.spec, device=device))
        return region.enter()


class CppRegion:
    """The streams of a region of a C++ wrapper, and the caller's events that it uses, which are objects of Python.
    `spec`: the fields of a `RegionSpec`, as text.
    """

    def __init__(self, spec: str) -> None:
        self.spec: RegionSpec = eval(f"RegionSpec({spec})")

    def enter(self) -> tuple[int, ...]:
        """Return the raw handle of each stream, and whether two of them are one."""
        spec = self.spec
        raw = [find_stream(stream).cuda_stream for stream in spec.streams]
        is_aliased = len({raw[i] for i in spec.distinct}) < len(spec.distinct)
        if is_aliased:
            order_aliased(spec, True)
        return *raw, is_aliased

    def leave(self) -> None:
        order_aliased(self.spec, False)

    def use_event(self, number: int, method: str, stream: int) -> None:
        streams = [find_stream(self.spec.streams[stream])] if stream >= 0 else []
        getattr(resolve(get_object(number)), method)(*streams)


region = Region  # as generated code calls it
