"""Finds the streams and events that the integer indices in compiled code stand for, at run time.

Streams and events can't be inputs of an FX graph, so Dynamo numbers those that a frame uses, and the graph holds the
numbers. At each call the compiled frame passes the objects in the order of their numbers:

    leave = enter(callers_stream(0), s, event, ...)
    try:
        ...                                        # the graph
    finally:
        leave()

Note [Lifetime of stream objects]
1. The table belongs to the thread and to the innermost running graph: calls nest, threads don't see each other's
   objects, and outside calls there is no table.
2. Index 0 is the stream that was current when the frame was entered, as a torch.cuda.Stream; it does not follow
   `torch.cuda.stream` blocks inside the graph.
3. The table holds objects of the caller during the call, never longer.
4. A stream or event that the frame creates and that can't be seen from outside is made at its first use in a thread and
   kept for later calls: an `Owned` object, which lives as long as the compiled code. An event that nobody looks up is
   never made.
5. An object that is returned, stored, or alive across a graph break is made anew at each call, before the graph runs.
6. A forward that will have a backward saves its table as a `Snapshot`; the backward runs with this table, except for
   index 0, which is the stream that autograd made current. The thread has the table only while the backward runs, and a
   copy of the table lives as long as autograd's node.

Note [Lookups of generated code]
Generated code looks an object up by `get(index)`. It does so at its own entry and keeps the object in a local variable,
so that nothing which runs in between can disturb it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.eval_frame import skip_code


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class _Thread(threading.local):
    objects: Sequence[object] | None = None


_thread = _Thread()

# torch.cuda.Stream objects by (stream id, device index, device type): making an object costs more than a look-up. The
# objects only name streams, which PyTorch never destroys; the bound is for programs with many external streams.
_stream_objects: dict[tuple[int, int, int], torch.Stream] = {}
_MOST_STREAM_OBJECTS = 256


class Owned(threading.local):
    """A stream or event of a compiled frame: one object per thread, made when it is first needed."""

    def __init__(self, make: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.make, self.args, self.kwargs = make, args, kwargs
        self.made: object = None

    def resolve(self) -> object:
        if self.made is None:
            self.made = self.make(*self.args, **self.kwargs)
        return self.made


def install(table: Sequence[object] | None) -> None:
    _thread.objects = table


def _leave_outermost() -> None:
    _thread.objects = None


def enter(*objects: object) -> Callable[[], None]:
    """Make `objects` the table of this thread; the returned function restores the previous table."""
    previous = _thread.objects
    _thread.objects = objects
    return _leave_outermost if previous is None else functools.partial(install, previous)


def current() -> Sequence[object] | None:
    """Return the table of this thread; None outside compiled calls."""
    return _thread.objects


def get(index: int) -> Any:
    """Return the stream or event with this number in the running graph."""
    objects = _thread.objects
    if objects is None or index >= len(objects):
        raise RuntimeError(f"stream object {index} was looked up outside the call of the graph that it belongs to")
    found = objects[index]
    if type(found) is Owned:
        return found.resolve()
    return found


def put(index: int, value: object) -> None:
    """Replace one object, as CUDA graph capture does for index 0."""
    objects = list(_thread.objects or ())
    if index > len(objects):
        raise RuntimeError(f"stream object {index} can't be set: the table has {len(objects)}")
    objects[index : index + 1] = [value]
    _thread.objects = objects


def callers_stream(device_index: int = -1) -> torch.Stream:
    """Return the current CUDA stream of a device, or of the current device."""
    if device_index < 0:
        device_index = torch._C._cuda_getDevice()
    key = torch._C._cuda_getCurrentStream(device_index)
    return _stream_objects.get(key) or _keep_stream_object(key)


def _keep_stream_object(key: tuple[int, int, int]) -> torch.Stream:
    if len(_stream_objects) >= _MOST_STREAM_OBJECTS:
        _stream_objects.clear()
    stream = _stream_objects[key] = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])
    return stream


def as_cuda_stream(stream: torch.Stream) -> torch.Stream:
    """Return the torch.cuda.Stream of a device-agnostic torch.Stream, which doesn't show its handle."""
    key = (stream.stream_id, stream.device_index, stream.device_type)
    return _stream_objects.get(key) or _keep_stream_object(key)


def as_base(stream: torch.Stream) -> torch.Stream:
    """Return the stream as a plain torch.Stream, the type that torch.accelerator.current_stream returns."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class Snapshot:
    """Table that a forward saves for its backward."""

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[object]) -> None:
        self.objects = [found.resolve() if type(found) is Owned else found for found in objects]

    def run(self, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the backward with this table; its caller's stream is the one that is current."""
        forward = self.objects[0]
        if not isinstance(forward, torch.cuda.Stream):
            return _run_with(self.objects, compiled, args)
        table = [callers_stream(), *self.objects[1:]]
        # The engine knows no stream of a node none of whose outputs is on a device.
        return run_after_forwards([forward], lambda: _run_with(table, compiled, args))


def run_after_forwards(forwards: Iterable[object], run: Callable[[], Any]) -> Any:
    """Run a backward on the current stream, which waits for the streams on which its forwards were called, and they for
    it afterwards. There the saved tensors were written, and their memory may be those streams'.
    """
    here: Any = callers_stream()
    streams = {s.cuda_stream: s for s in forwards if isinstance(s, torch.cuda.Stream)}
    streams.pop(here.cuda_stream, None)
    for forward in streams.values():
        here.wait_stream(forward)
    try:
        return run()
    finally:
        for forward in streams.values():
            forward.wait_stream(here)


def _run_with(objects: Sequence[object], compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    leave = enter(*objects)
    try:
        return compiled(*args)
    finally:
        leave()


# Generated bytecode calls these in the middle of the user's frames, where Dynamo looks at every call.
for _function in (enter, install, _leave_outermost, callers_stream, _keep_stream_object, as_base):
    skip_code(_function.__code__)
