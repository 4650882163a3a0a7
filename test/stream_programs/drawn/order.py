"""What a drawn program has ordered so far: clocks of streams and of the host, as eager would run it.

The writer of programs asks before each line which accesses the line's stream isn't ordered after (`missing`), writes
the synchronisation, and notes it here. So every program is free of races by construction, memory that the allocator
hands on included: what is freed lies in a pool of its stream, and the next allocation there is ordered after all that
touched it.
"""

from dataclasses import dataclass, field


HOST = -1
CURRENT = 0

Clock = dict[int, int]  # stream -> its last position that is known to be over


@dataclass
class Storage:
    """One block of memory. `bound` limits the absolute value of its elements."""

    stream: int
    bound: float
    persistent: bool = False  # the same in every call
    saved: bool = False  # autograd may have kept it
    is_complex: bool = False  # stock Inductor compiles no custom operator that updates it
    writes: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def later(into: Clock, other: Clock) -> None:
    for stream, position in other.items():
        into[stream] = max(into.get(stream, 0), position)


class Order:
    def __init__(self, streams: int) -> None:
        """Streams 1 to `streams` beside the current one, which has done its first position at the entry."""
        self.clocks: dict[int, Clock] = {s: {} for s in range(HOST, streams + 1)}
        self.clocks[CURRENT] = {CURRENT: 1}
        self.events: dict[str, tuple[int, Clock]] = {}  # name -> the stream that recorded it, its clock
        self.pools: dict[int, Clock] = {s: {CURRENT: 1} for s in range(HOST, streams + 1)}
        self.pools[HOST] = {}

    # ---- accesses

    def missing(
        self, stream: int, reads: list[Storage], writes: list[Storage], allocates: bool = False
    ) -> dict[int, int]:
        """The accesses, one a stream, that `stream` isn't ordered after."""
        needed: Clock = {} if stream == HOST else {CURRENT: 1}
        for storage in reads:
            later(needed, storage.writes)
        for storage in writes:
            later(needed, storage.writes)
            later(needed, storage.reads)
        if allocates:
            later(needed, self.pools[stream])
        return self.uncovered(stream, needed)

    def uncovered(self, stream: int, needed: Clock) -> dict[int, int]:
        clock = self.clocks[stream]
        # The host runs one thing after the other, and launches after what it has done.
        return {s: p for s, p in needed.items() if s not in (stream, HOST) and clock.get(s, 0) < p}

    def launch(self, stream: int, reads: list[Storage], writes: list[Storage]) -> None:
        clock = self.clocks[stream]
        clock[stream] = position = clock.get(stream, 0) + 1
        for storage in reads:
            storage.reads[stream] = position
        for storage in writes:
            storage.writes[stream] = position

    def free(self, storage: Storage) -> None:
        if storage.persistent or storage.stream == HOST:
            return
        for accesses in (storage.reads, storage.writes):
            later(self.pools[storage.stream], {s: p for s, p in accesses.items() if s not in storage.lent})

    # ---- synchronisation

    def wait_stream(self, stream: int, other: int) -> None:
        later(self.clocks[stream], self.clocks[other])
        if stream == HOST:
            self.host_waited()

    def record(self, event: str, stream: int) -> None:
        self.events[event] = stream, dict(self.clocks[stream])

    def wait_event(self, stream: int, event: str) -> None:
        if event in self.events:
            later(self.clocks[stream], self.events[event][1])
        if stream == HOST:
            self.host_waited()

    def host_waited(self) -> None:
        """Whatever is launched from now on comes after what the host has waited for."""
        for clock in self.clocks.values():
            later(clock, self.clocks[HOST])

    def covering(self, needed: dict[int, int]) -> list[str]:
        """Events that a wait for which is enough."""
        return [
            name for name, (_, clock) in self.events.items() if all(clock.get(s, 0) >= p for s, p in needed.items())
        ]
