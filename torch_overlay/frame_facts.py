"""Facts about a frame that its graph doesn't show, handed from Dynamo to the layers that compile the graph.

A graph names streams and events by number. Who made an object, who can see it, and whether the function goes on after
the graph, is known to Dynamo alone (`_dynamo.registry`), and complete once Dynamo calls the backend. There Dynamo fills
one frozen record, and the record holds until the backend returns. A backward may be compiled after other frames have
been traced: the record stays with the tracing context, which the forward and its backward share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Literal, TYPE_CHECKING

from torch._guards import TracingContext


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

Origin = Literal["current", "caller", "frame"]


@dataclasses.dataclass(frozen=True)
class ObjectInfo:
    """Compile-time facts about one stream or event (or other object) of the frame."""

    index: int
    # "current": a stream that was current, on its device, when the frame was entered. "caller": the object came from
    # outside. "frame": the frame makes the object.
    origin: Origin
    # True if the outside can see the object after the call, or another graph of the same function uses it.
    escapes: bool
    kind: Literal["stream", "event", "other"]
    device: torch.device | None
    # Only for streams that the frame makes.
    priority: int | None = None


@dataclasses.dataclass(frozen=True)
class FrameFacts:
    objects: tuple[ObjectInfo, ...] = ()
    # Position of an input of the graph -> the stream of the first operation that reads the input.
    first_readers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    # The graph ends at a graph break: a value that it made may be a local variable of the caller, though nothing needs
    # it any more.
    goes_on: bool = False
    # The frame goes on after a graph break of its function.
    is_resumed: bool = False
    # The frame reads a stream's raw handle: work launched by the handle can't be part of a captured graph.
    handle_is_read: bool = False
    # A frame traced in this process has named a stream or an event, even if only the current stream.
    program_has_streams: bool = False


_current = FrameFacts()
_remembered: weakref.WeakKeyDictionary[TracingContext, FrameFacts] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def compiling(facts: FrameFacts) -> Iterator[None]:
    """Compile the graph of a frame, inside of what else is being compiled."""
    global _current
    outer, _current = _current, facts
    try:
        yield
    finally:
        _current = outer


def remember() -> None:
    """Keep the facts for the backward of the graph that is being compiled."""
    context = TracingContext.try_get()
    if context is not None:
        _remembered[context] = _current


def current() -> FrameFacts:
    """Return the facts of the frame whose graph, or whose graph's backward, is being compiled."""
    context = TracingContext.try_get()
    return _remembered.get(context, _current) if context is not None else _current
