"""Keeps what a region has for each key of its calls (`States`), and chooses what is in a key (`CallKeys`).

When there are too many graphs, the least recently used one is dropped; when there are too many states, one without a
graph, if there is one. A region whose keys don't come again is captured for a bounded number of times.

The inputs that are not tensors on the device are in the key, but for seeds of attention, wherever they are: Note [Seeds
of attention] of `attention_seeds`.

Note [Numbers that are parameters]
A number that no tensor's size or stride depends on is left out of the key: the graph computes with the number of each
launch (`numbers`). If a capture shows that the region uses the number for anything else, the number is put into the key
(`kept`), and the region begins anew.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, TYPE_CHECKING

from torch import Tensor

from torch_overlay._inductor.relaunch import attention_seeds, compiled_region, keys
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.causes import log
from torch_overlay._inductor.relaunch.compiled_region import address_of, alignment_of, LEAST
from torch_overlay._inductor.relaunch.launch.relaunch import graph_of
from torch_overlay._inductor.relaunch.numbers.traced import NUMBERS


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Sequence

    from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan
    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.launch.relaunch import Graph
    from torch_overlay._inductor.relaunch.verify import Launchable


TABLES = 4  # so many times more states are kept than graphs


class State:
    """The state of a region for one key: its plan for a capture, the alignments of its inputs, its graph."""

    def __init__(self) -> None:
        self.warm_in: set[int] = set()  # threads that ran it; libraries keep some of their choices per thread
        self.plan: AllocationPlan | None = None
        self.alignments: dict[int, int] = {}  # that the calls so far need
        self.captured_for: dict[int, int] = {}  # those that the graph was captured for
        self.calls = self.failures = 0  # without a graph; captures that failed
        self.refused = ""  # code of the cause, if it gets no graph
        self.relaunch: Launchable | None = None
        self.waited = 0.0  # seconds of the host in calls that waited for a capture
        self.used = 0  # when it was last asked for: `States.now`

    def update_alignments(self, inputs: Sequence[Any], static: Container[int]) -> bool:
        """True if there is a graph for the alignments of all inputs so far. If not, `alignments` are those for which it
        has to be captured. `static`: positions of inputs that don't move."""
        had_graph, is_less = self.relaunch is not None, False
        for k, value in enumerate(inputs):
            if capture.is_region(value):
                aligned = alignment_of(address_of(value))
                if aligned < self.alignments.setdefault(k, compiled_region.FULL):
                    self.alignments[k] = aligned if k in static else LEAST
                    is_less = True
        if had_graph and is_less:
            moving = (k for k, v in enumerate(inputs) if capture.is_region(v) and k not in static)
            self.alignments.update(dict.fromkeys(moving, LEAST))
        return had_graph and self.alignments == self.captured_for


class States(dict[Any, State]):
    """The states of a region by key. Who adds, drops or replaces one holds `lock`; a call of a state that is there only
    sets `used`."""

    __slots__ = ("bound", "captures", "launches", "lock", "now", "try_launch")  # which each call reads

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound  # so many have graphs
        self.lock = threading.RLock()  # a finalizer may come here while it is held
        self.captures = 0  # of them all
        self.try_launch: Callable[[list[Any]], Any] | None = None  # the only graph's, if the region needs no key
        self.launches = ctypes.c_ulonglong()  # of all graphs that there were: the C module counts them here
        self.now: Callable[[], int] = itertools.count(1).__next__

    @property
    def most_captures(self) -> int:
        return 4 * self.bound

    def add(self, key: Any) -> State | None:
        """Return a new state for a key that has none; None if the region was captured too often."""
        if self.captures >= self.most_captures:
            return None
        with self.lock:
            if key in self:  # by another thread
                return self[key]
            if len(self) >= TABLES * self.bound:
                self.pop(min(self, key=lambda each: (self[each].relaunch is not None, self[each].used)))
            state = self[key] = State()
            state.used = self.now()
            return state

    def replace(self, states: dict[Any, State]) -> None:
        with self.lock:
            self.try_launch = None
            self.clear()
            self.update(states)

    def set_graph(self, state: State, relaunch: Any = None) -> None:
        """Give a state its graph, in place of the one that it may have had; without one, take it away."""
        with self.lock:
            state.relaunch, self.try_launch = relaunch, None
            graphs = [key for key, each in self.items() if each.relaunch is not None]
            if len(graphs) > self.bound:
                self.pop(min(graphs, key=lambda key: self[key].used))

    def forget(self) -> list[State]:
        """Drop all graphs. Return the states, which the caller lets go of without the lock."""
        with self.lock:
            dropped = list(self.values())
            self.replace({})
            self.captures = 0
            return dropped

    def launched(self) -> int:
        """Return how many calls a graph has run."""
        return self.launches.value

    def graphs(self) -> list[Graph]:
        """Return the graphs that there are now."""
        with self.lock:
            made = [state.relaunch for state in self.values() if state.relaunch is not None]
        return list(map(graph_of, made))


class CallKeys:
    """Positions of the inputs that are in a key (`keyed`: numbers, then `scalars`, tensors in host memory), and of
    those that are in none: `seeds` of attention, and `free` numbers. `kept`: numbers that had to be put into the key,
    and why. `key_of` makes the key of a call; None before the first call."""

    def __init__(self, code: CodeFacts) -> None:
        self.code = code
        self.key_of: Callable[[Sequence[Any]], Any] | None = None
        self.keyed: tuple[int, ...] = ()
        self.scalars: frozenset[int] = frozenset()
        self.seeds: frozenset[int] = frozenset()
        self.free: tuple[int, ...] = ()
        self.kept: dict[int, str] = {}

    def choose(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """Choose by the inputs of the first call, and return `key_of`."""
        could_be = {range(len(inputs))[k] for k in self.code.numbers}.difference(self.kept)
        self.free = tuple([k for k in sorted(could_be) if type(inputs[k]) in NUMBERS])
        left_out = self.seeds.union(self.free)
        others = [k for k, value in enumerate(inputs) if not capture.is_region(value) and k not in left_out]
        self.scalars = frozenset([k for k in others if isinstance(inputs[k], Tensor)])
        return self._key(others)

    def _key(self, positions: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
        numbers, scalars = ([k for k in positions if (k in self.scalars) is among] for among in (False, True))
        self.keyed, self.key_of = (*numbers, *scalars), (key_of := keys.key_of(numbers, scalars))
        return key_of

    def drop_seeds(self, key: Any) -> Any:
        """Take seeds out of the key, and return what this key of a call has become."""
        kept = [i for i, k in enumerate(self.keyed) if k not in self.seeds]
        positions = [self.keyed[i] for i in kept]
        self.scalars = self.scalars.intersection(positions)
        self._key(positions)
        return tuple([key[i] for i in kept])

    def place_seeds(self, inputs: list[Any], device: Cuda) -> None:
        """Move seeds to the device that are in host memory because the forward ran as compiled."""
        on_host = [k for k in self.seeds if not capture.is_region(inputs[k])]
        if on_host and not device.is_capturing():
            for k in on_host:
                inputs[k] = attention_seeds.to_device(inputs[k], device.device)

    def keep(self, positions: Collection[int], why: str) -> None:
        """Put free numbers into the key of the next calls, all of them if it is not known which."""
        for k in (positions := positions or self.free):
            log.info("%s: each value of the number at input %d gets a graph of its own: %s", self.code.name, k, why)
        self.kept |= dict.fromkeys(positions, why)
        self.key_of = None
