"""What generated code calls at run time for a region with streams.

    _region0 = region(device=0, streams={"stream0": "cuda:0", "stream1": 1}, events=2, exit=...,
                      entry=(("record", "ev0", "stream0"), ("wait", "ev0", "stream1")), returns=("stream1_raw",))

    frame0, stream1_raw, = _region0.enter()
    ...
    frame0.leave()

`enter` looks the streams up (a number is an index into the table of the running graph, "cuda:0" the current stream of
that device), records and waits as `entry` says, in its order, and returns the frame of this call and what the code
between uses; `leave` does what the region owes to the caller's streams. Events belong to the compiled module: a call
takes a frame, with a set of them, and gives it back when it leaves, so two threads, or a call inside a call, never
share one; a call that raises only leaves its frame to be collected.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch._C._dynamo.guards import copy_if_misaligned

from torch_overlay._dynamo import objects
from torch_overlay._dynamo.objects import ambient, get as get_object, Owned
from torch_overlay._functorch.offload.runtime import copy_stream
from torch_overlay._functorch.streams.ids import is_copy_stream
from torch_overlay._inductor.streams import native as stream_native
from torch_overlay._inductor.streams.native import PythonEvent


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


ALIGNMENT = 16  # bytes: what Inductor takes inputs to be aligned to

set_stream = torch._C._accelerator_setStream
"""Makes a stream the current one of its device, and its device the current one: inside a device guard that is no
change.
"""


def restore_stream(stream: torch.Stream) -> None:
    """Makes a stream the current one of its device, and leaves the current device alone."""
    device = torch._C._cuda_getDevice()
    set_stream(stream)
    if device != stream.device_index:
        torch._C._cuda_setDevice(device)


def aligned(tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
    """The tensor, or an aligned copy of it that is made on the stream. None, which `enter` hands out where a call keeps
    to the caller's stream, is the current one.
    """
    if not tensor.data_ptr() % ALIGNMENT:
        return tensor
    with torch.cuda.stream(stream):
        return copy_if_misaligned(tensor)


def write_back(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Copy what was written to an aligned copy into the caller's memory, on the stream, or on the current one."""
    with torch.cuda.stream(stream):
        target.copy_(source)


def _as_cuda_stream(stream: torch.Stream) -> torch.Stream:
    """The torch.cuda.Stream of a device-agnostic torch.Stream, which doesn't show its handle."""
    key = (stream.stream_id, stream.device_index, stream.device_type)
    found = objects._stream_objects.get(key)
    if found is None:
        found = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])
        objects._stream_objects[key] = found
    return found


def resolve(found: Any) -> Any:
    """What an entry of a graph's table stands for: a torch.cuda.Stream, or an event."""
    if type(found) is Owned:
        found = found.resolve()
    elif type(found) is int:
        return copy_stream(found)
    return _as_cuda_stream(found) if type(found) is torch.Stream else found


def align(*streams: torch.Stream) -> None:
    """Order all the streams behind one another.

    Note [Streams that turn out to be one]
    The plan takes the caller's streams for different ones, and none for the ambient stream, as they were when the
    function was compiled. Where two of them are one stream in some call, a promise to one is a promise to the other:
    the call orders them fully at its entry and exit instead.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


@dataclass(frozen=True)
class Spec:
    """A region as its module defines it. Operations are (kind, event, stream), by the names of the generated code."""

    device: int | None  # None: streams of several devices, ordered by torch.Event
    streams: Mapping[str, int | str]
    events: int
    entry: Sequence[tuple[str, str, str]]
    exit: Sequence[tuple[str, str, str]]
    returns: Sequence[str]
    objects: Mapping[str, int]
    distinct: Sequence[str]
    waits_again: Sequence[str]
    records_again: Sequence[tuple[str, str]]
    follows: Sequence[str] | None = None

    def find(self, stream: str) -> Any:
        where = self.streams[stream]
        if isinstance(where, str):
            return ambient(int(where[5:]))
        return resolve(where if is_copy_stream(where) else get_object(where))

    def event(self, name: str) -> int:
        return int(name[2:].partition("_")[0])

    def aliased(self, entering: bool) -> None:
        """Two of the streams are one in this call: Note [Streams that turn out to be one]."""
        align(*map(self.find, self.distinct))
        if entering:
            for event in self.waits_again:
                resolve(get_object(self.objects[event])).wait(self.find(self.distinct[0]))
        else:
            for event, stream in self.records_again:
                resolve(get_object(self.objects[event])).record(self.find(stream))


class _Frame:
    """One call of a PythonRegion."""

    def __init__(self, region: PythonRegion) -> None:
        make: Callable[[], Any] = (
            functools.partial(torch.Event, device="cuda")
            if region.spec.device is None
            else functools.partial(PythonEvent, region.spec.device)
        )
        self.region = region
        self.events = [make() for _ in range(region.spec.events)]
        self.streams: dict[str, Any] = {}
        self.is_aliased = False
        self.spread = True

    def handle(self, stream: str) -> Any:
        found = self.streams[stream]
        return found if self.region.spec.device is None else found.cuda_stream

    def run(self, operations: Sequence[tuple[str, str, str]]) -> None:
        spec = self.region.spec
        captured = bool(operations) and spec.device is not None and self.is_captured()
        for kind, name, stream in operations:
            event, handle = self.events[spec.event(name)], self.handle(stream)
            if kind == "record_entry":
                event.captured = event.is_capturing(handle)
                event.record(handle)
            elif kind == "wait_exit":
                joins = captured and not event.is_capturing(handle)
                event.wait(handle)
                if joins:
                    back = PythonEvent(event.device.index)
                    back.record(handle)
                    back.wait(self.handle(next(iter(spec.streams))))
            else:
                getattr(event, kind)(handle)

    def result(self, name: str) -> Any:
        spec = self.region.spec
        if name in spec.streams:
            return self.streams[name]
        if name in spec.objects:
            return resolve(get_object(spec.objects[name]))
        if name.startswith("spread"):
            return self.spread
        if name.endswith("_raw"):
            return self.streams[name[:-4] if self.spread else next(iter(spec.streams))].cuda_stream
        return self.events[spec.event(name)]

    def holds_nothing(self) -> bool:
        """Note [Streams can't pay on an idle device]. A captured stream can't be asked."""
        if self.is_aliased or self.is_captured():
            return False
        caller = next(iter(self.streams.values()))
        return all(s.query() for s in (caller, *(self.streams[name] for name in self.region.spec.follows or ())))

    def is_captured(self) -> bool:
        """The caller captures a CUDA graph on the region's first stream."""
        with torch.cuda.stream(next(iter(self.streams.values()))):
            return torch.cuda.is_current_stream_capturing()

    def leave(self) -> None:
        spec = self.region.spec
        if self.spread:
            self.run(spec.exit)
        elif spec.follows:
            caller = next(iter(spec.streams))
            self.run([("record", "ev0", caller), *(("wait", "ev0", name) for name in spec.follows)])
        self.streams = {}
        self.region.frames.append(self)
        if self.is_aliased:
            self.region.spec.aliased(False)


class PythonRegion:
    """The native Region's behaviour in Python, and the only one for streams of several devices."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.frames: list[_Frame] = []

    def enter(self) -> tuple[Any, ...]:
        spec = self.spec
        frame = self.frames.pop() if self.frames else _Frame(self)
        frame.streams = {name: spec.find(name) for name in spec.streams}
        handles = {frame.streams[name].cuda_stream for name in spec.distinct}
        frame.is_aliased = len(handles) < len(spec.distinct)
        if frame.is_aliased:
            spec.aliased(True)
        frame.spread = spec.follows is None or not frame.holds_nothing()
        if frame.spread:
            frame.run(spec.entry)
        return frame, *(frame.result(name) for name in spec.returns)


def native_region(spec: Spec) -> Any:
    """The region by the native module; None where that can't be had."""
    native = stream_native.module()
    if native is None or spec.device is None:
        return None
    slots = {name: slot for slot, name in enumerate(spec.streams)}

    def operations(chosen: Sequence[tuple[str, str, str]]) -> tuple[tuple[str, int, int], ...]:
        return tuple((kind, spec.event(event), slots[stream]) for kind, event, stream in chosen)

    def result(name: str) -> tuple[str, int]:
        if name in slots:
            return "stream", slots[name]
        if name in spec.objects:
            return "object", spec.objects[name]
        if name.startswith("spread"):
            return "spread", 0
        return ("raw", slots[name[:-4]]) if name.endswith("_raw") else ("event", spec.event(name))

    return native.Region(
        device=spec.device,
        indices=tuple(-1 if isinstance(where, str) else where for where in spec.streams.values()),
        events=spec.events,
        entry=operations(spec.entry),
        exit=operations(spec.exit),
        results=tuple(map(result, spec.returns)),
        distinct=tuple(slots[name] for name in spec.distinct),
        follows=None if spec.follows is None else tuple(slots[name] for name in spec.follows),
        thread=objects._thread,
        stream_type=torch.cuda.Stream,
        current_raw=torch._C._cuda_getCurrentRawStream,
        current=ambient,
        resolve=resolve,
        aliased=spec.aliased,
    )


class Region:
    """A region of a generated module. The native module is built at the first call, not when the module is loaded."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.enter: Callable[[], tuple[Any, ...]] = self._enter_first

    def _enter_first(self) -> tuple[Any, ...]:
        self.enter = (native_region(self.spec) or PythonRegion(self.spec)).enter
        return self.enter()


def region(
    device: int | None,
    streams: Mapping[str, int | str],
    events: int = 0,
    entry: Sequence[tuple[str, str, str]] = (),
    exit: Sequence[tuple[str, str, str]] = (),
    returns: Sequence[str] = (),
    objects: Mapping[str, int] | None = None,
    distinct: Sequence[str] = (),
    waits_again: Sequence[str] = (),
    records_again: Sequence[tuple[str, str]] = (),
    follows: Sequence[str] | None = None,
) -> Region:
    """The region of a generated module.

    `streams` maps names to indices of the running graph's table, or to "cuda:N", the current stream of that device;
    where one of the latter is used by `exit`, it comes first. `objects` are events of the caller. `distinct` are the
    streams that the plan took for different ones; where two of them are one in a call, all are ordered behind one
    another, the first waits again for `waits_again`, and `records_again` (event, stream) are repeated at the end. With
    `follows`, a call that finds these streams and the first one idle runs on the first one, and `spread` is False.
    """
    return Region(
        Spec(
            device, streams, events, entry, exit, returns, objects or {}, distinct, waits_again, records_again, follows
        )
    )


__all__ = ["align", "aligned", "ambient", "get_object", "region", "restore_stream", "set_stream", "write_back"]
