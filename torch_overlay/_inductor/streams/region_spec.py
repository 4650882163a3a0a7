"""Define the boundary of a region as data: what is looked up, recorded and waited for at its entry and exit.

Generated code has a region's definition in its header, as numbers; comments have the names that its lines use.

    _region0 = region(
        device=0,
        streams=(-2, 1),  # stream0, stream1
        events=2,
        entry=((0, 0, 0), (3, 0, 1)),  # record ev0 stream0, wait ev0 stream1
        results=((0, 1), (2, 1)),  # stream1_raw, ev1
        distinct=(0, 1),  # stream0, stream1
    )

`streams.region_names` writes it. `csrc/region.c` interprets it for one device, and `streams.runtime.EventRegion` for
several devices and for the simulated one. A stream is given by its position in `streams`, and an event by its number.
"""

from __future__ import annotations

import dataclasses
import enum


class OperationKind(enum.IntEnum):
    """The kinds of an operation on an event and a stream, as numbered in `csrc/region.c`. Notes of `streams.runtime`
    describe them.
    """

    RECORD = 0
    RECORD_BUSY = 1
    RECORD_ENTRY = 2
    WAIT = 3
    WAIT_ENTRY = 4
    WAIT_EXIT = 5

    __repr__ = int.__repr__  # as a definition has it

    @property
    def method(self) -> str:
        """The name of the operation as a method of an event."""
        return self.name.lower()


class ResultKind(enum.IntEnum):
    """The kinds of a result of `enter`, as numbered in `csrc/region.c`."""

    RAW = 0  # the raw handle of the stream on which a call does a stream's work
    STREAM = 1
    EVENT = 2
    OBJECT = 3  # an event of the caller, by its index in the running graph's table
    MULTI_STREAM = 4  # whether this call uses the side streams

    __repr__ = int.__repr__


Operation = tuple[int, int, int]
"""An `OperationKind`, an event, and a stream."""


def of_device(number: int) -> int:
    """Return the number that stands for a device's current stream in `RegionSpec.streams`; of such a number, the
    device. The device may be CURRENT_DEVICE.
    """
    return -2 - number


@dataclasses.dataclass(frozen=True)
class RegionSpec:
    device: int | None  # None: streams of several devices, ordered by torch.Event
    streams: tuple[int, ...]
    """Indices in the running graph's table, numbers of copy streams, or current streams (`of_device`). The device's own
    current stream is the first one."""
    events: int = 0
    entry: tuple[Operation, ...] = ()
    exit: tuple[Operation, ...] = ()
    results: tuple[tuple[int, int], ...] = ()  # of `enter`, after the frame: a `ResultKind` and a number of that kind
    distinct: tuple[int, ...] = ()
    """The streams that the plan assumes to be different: Note [Streams that turn out to be one] of `streams.runtime`"""
    idle_streams: tuple[int, ...] | None = None
    """A call that finds these streams and the first one idle runs on the first one. None: no call does so"""
    waits_again: tuple[int, ...] = ()  # the caller's events for which the first of `distinct` waits once more
    records_again: tuple[tuple[int, int], ...] = ()  # the caller's events and streams that are recorded at the end

    @property
    def exit_alone(self) -> tuple[Operation, ...]:
        """The operations at the exit of a call that ran on the first stream: the idle streams are ordered after it."""
        waits = [(OperationKind.WAIT, 0, stream) for stream in self.idle_streams or ()]
        return ((OperationKind.RECORD, 0, 0), *waits) if self.idle_streams else ()

    @property
    def objects(self) -> set[int]:
        """The caller's events, by their indices in the running graph's table."""
        return {number for kind, number in self.results if kind == ResultKind.OBJECT}
