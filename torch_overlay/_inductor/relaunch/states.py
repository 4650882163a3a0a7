"""Keeps what a region has for each key of its calls: `States`.

The least recently used state is dropped when there are too many. A region whose keys don't come again is captured for a
bounded number of times.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch import alignment
from torch_overlay._inductor.relaunch.alignment import address_of, alignment_of, LEAST
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import Plan
from torch_overlay._inductor.relaunch.launch.staged import graph_of, launches_of
from torch_overlay._inductor.relaunch.sizes.sizes import Sizes


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch
    from torch_overlay._inductor.relaunch.launch.staged import Graph, Split
    from torch_overlay._inductor.relaunch.verify import Verified

TABLES = 4  # so many times more sizes are kept if they share executables


class State:
    """The state of a region for one key: its plan for a capture, the alignments of its inputs, its graph."""

    def __init__(self) -> None:
        self.warm_in: set[int] = set()  # threads that ran it; libraries keep some of their choices per thread
        self.plan = Plan()
        self.alignments: dict[int, int] = {}  # that the calls so far need
        self.captured_for: dict[int, int] = {}  # those that the graph was captured for
        self.failures = 0
        self.refused = ""  # code of the cause, if it gets no graph
        self.relaunch: Relaunch | Split | Verified | None = None
        self.shared: Any = None  # what its executable is shared by, if it is
        self.spent = 0.0  # seconds of the host in calls that waited for a capture
        self.alone = False  # the driver can't set the shared executable's nodes to this graph's

    def is_ready(self, inputs: Sequence[Any], static: Container[int]) -> bool:
        """True if there is a graph for the alignments of all inputs so far. If not, `alignments` are those for which it
        has to be captured. `static`: positions of inputs that don't move."""
        had_graph, is_less = self.relaunch is not None, False
        for k, value in enumerate(inputs):
            if capture.is_region(value):
                aligned = alignment_of(address_of(value))
                if aligned < self.alignments.setdefault(k, alignment.FULL):
                    self.alignments[k] = aligned if k in static else LEAST
                    is_less = True
        if had_graph and is_less:
            moving = (k for k, v in enumerate(inputs) if capture.is_region(v) and k not in static)
            self.alignments.update(dict.fromkeys(moving, LEAST))
        return had_graph and self.alignments == self.captured_for


class States(OrderedDict[Any, State]):
    """The states of a region by key, the most recently used last. `bound`: so many have graphs; `captures` and
    `warm_ups`: of them all, warm-ups since the last capture; `attempt`: that of the only state's graph, if the region
    needs no key. Who changes them holds `lock`."""

    __slots__ = ("attempt",)  # which each call reads; attributes of a subclass of OrderedDict are slow

    def __init__(self, bound: int, executables: int) -> None:
        super().__init__()
        self.bound, self.sizes = bound, Sizes(executables)
        self.lock = threading.RLock()  # a finalizer may come here while it is held
        self.captures = self.warm_ups = 0
        self.attempt: Callable[[list[Any]], Any] | None = None
        self.seen: OrderedDict[Any, bool] = OrderedDict()  # keys that came once, when most come only once
        self.launched_before = 0  # launches of graphs that are dropped

    @property
    def most_captures(self) -> int:
        return 4 * self.bound

    @property
    def has_captured_enough(self) -> bool:
        return self.captures >= self.most_captures

    def touch(self, key: Any) -> None:
        with self.lock:
            if key in self:
                self.move_to_end(key)

    def of(self, key: Any) -> State | None:
        """Return the state of a key, a new one if it has none; None if it has none and the region was captured too
        often."""
        with self.lock:
            state = self.get(key)
            if state is None and not self.has_captured_enough:
                state = self[key] = State()
                while len(self) > self.bound * (TABLES if self.sizes.executables else 1):
                    self.drop(next(iter(self)))
            return state

    def comes_for_the_first_time(self, key: Any) -> bool:
        """True if so many keys have come in a row without coming again that this one must come twice to be warmed up
        for: to observe a call takes longer than the call, and its state takes the place of one that has a graph."""
        if self.warm_ups < self.most_captures or key in self:
            return False
        with self.lock:
            known = self.seen.pop(key, None) is not None
            if not known:
                self.seen[key] = True
                while len(self.seen) > self.most_captures:
                    self.seen.popitem(last=False)
            return not known

    def is_shared(self, state: State) -> bool:
        """True if the state's graph is to share an executable with other sizes."""
        with self.lock:
            return self.sizes.is_shared(state, self.values())

    def waits(self, state: State) -> bool:
        """True if the state has no graph, and it has not yet shown that it pays to capture it."""
        with self.lock:
            return state.relaunch is None and self.sizes.waits(state, self.values())

    def replace(self, states: dict[Any, State]) -> None:
        with self.lock:
            self.attempt = None
            self.clear()
            self.update(states)

    def add(self, key: Any, state: State) -> None:
        """Add a state whose graph serves calls of other keys. States that wait for a graph are dropped."""
        with self.lock:
            self.replace({k: s for k, s in self.items() if s.relaunch is not None or s.refused} | {key: state})
            self.captures, self.warm_ups = self.captures + 1, 0

    def drop(self, key: Any) -> None:
        with self.lock:
            self.launched_before += launches_of(self.pop(key).relaunch)

    def set_graph(self, state: State, relaunch: Any = None, shared: Any = None) -> None:
        """Give a state its graph, in place of the one that it may have had; without arguments, take it away."""
        with self.lock:
            self.launched_before += launches_of(state.relaunch)
            state.relaunch, state.shared, self.attempt = relaunch, shared, None

    def drop_unkept(self) -> None:
        """Drop the graphs whose shared executable is kept no longer."""
        with self.lock:
            for state in self.values():
                if state.shared is not None and not self.sizes.keeps(state.shared):
                    self.set_graph(state)

    def forget(self) -> list[State]:
        """Drop all graphs. Return the states, which the caller lets go of without the lock."""
        with self.lock:
            self.launched_before = self.launched()
            dropped = list(self.values())
            self.replace({})
            self.sizes = Sizes(self.sizes.bound)
            self.captures = self.warm_ups = 0
            self.seen.clear()
            return dropped

    def launched(self) -> int:
        """Return how many calls a graph has run."""
        with self.lock:
            return self.launched_before + sum(launches_of(state.relaunch) for state in self.values())

    def graphs(self) -> list[Graph]:
        """Return the graphs that there are now."""
        with self.lock:
            made = [state.relaunch for state in self.values() if state.relaunch is not None]
        return list(map(graph_of, made))
