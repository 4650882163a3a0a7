"""Events and region boundaries for generated code: driver calls, without what torch.Event adds around them.

`torch.Event.record` costs 0.55 us of host time, of which the driver's share is a third; a fork and a join of eight
streams is 25 such calls. `Event` here takes the raw handle of a stream, which generated code has anyway; `Region`
does in one call what a region does when it is entered, and in one what it does when it is left (`csrc/events.c`).
Without a compiler, or without the driver, Python classes of the same behaviour take its place (`PythonEvent` here,
`PythonRegion` in `streams.runtime`). An event belongs to one device and orders streams of that device: an event that
crosses devices is a torch.Event.

Note [Boundary events under the caller's capture]
When the caller captures a CUDA graph, a stream is part of the capture from the moment at which it waits for a stream
that is. What another stream held before that is no part of the graph, and waiting for it would end the capture: such
a wait is skipped (`record_entry`, `wait_entry`). And a stream that is made to wait for the ambient stream when the
region is left would be part of the capture and never joined: it is joined at once (`wait_exit`), so that it stands as
eager leaves a stream that was forked and joined.

Note [Streams that hold nothing]
Where several streams wait for what the ambient stream held at the entry, `record_busy` asks first whether it holds
anything at all. On a device that waits for its host it doesn't, and then there is nothing to record and to wait for. A
kernel behind a wait costs the host about a microsecond more than one that isn't. The question itself costs as much for
a stream that has just come to rest, so a side stream is not asked: a record and a wait are cheaper.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_overlay import config, csrc


class PythonEvent:
    """The same by torch.Event, for hosts without a C compiler."""

    def __init__(self, device_index: int) -> None:
        self.device = torch.device("cuda", device_index)
        self.event = torch.Event(device=self.device)
        self.captured = self.idle = False

    def record(self, raw_stream: int) -> None:
        self.idle = False
        self.event.record(_stream(raw_stream, self.device.index))

    def wait(self, raw_stream: int) -> None:
        if not self.idle:
            self.event.wait(_stream(raw_stream, self.device.index))

    def record_busy(self, raw_stream: int) -> None:
        self.idle = not self.is_capturing(raw_stream) and _stream(raw_stream, self.device.index).query()
        if not self.idle:
            self.record(raw_stream)

    def wait_entry(self, raw_stream: int) -> None:
        if self.captured or not self.is_capturing(raw_stream):
            self.wait(raw_stream)

    def is_capturing(self, raw_stream: int) -> bool:
        with torch.cuda.stream(_stream(raw_stream, self.device.index)):  # type: ignore[arg-type]
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        self.event.synchronize()


@functools.lru_cache(maxsize=256)
def _stream(raw_stream: int, device_index: int) -> torch.Stream:
    if raw_stream == 0:
        return torch.cuda.default_stream(device_index)
    return torch.cuda.ExternalStream(raw_stream, device=device_index)


def module() -> Any:
    """`events` of the extension module if it is wanted (`config.native_events`) and there is one, else None."""
    extension = csrc.extension() if config.native_events else None
    return extension.events if extension is not None else None
