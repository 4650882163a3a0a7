"""Keeps a region's graph for any size: decides when it is made, and launches it. Note [Graphs for any size] of
`sizes.any_size`

It is made at the first call with a second size. Numbers that were the same in both calls are in its key; when a call
shows another value of one, a new graph takes its place. A size that has a graph of its own keeps it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TYPE_CHECKING

from torch_overlay._inductor.relaunch import keys, refusals
from torch_overlay._inductor.relaunch.alignment import address_of, alignment_of, LEAST
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import Plan
from torch_overlay._inductor.relaunch.capture.make_graph import capturing, make_graph_for_any_size, Work
from torch_overlay._inductor.relaunch.launch.native_call import Misaligned
from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch
from torch_overlay._inductor.relaunch.launch.staged import launches_of
from torch_overlay._inductor.relaunch.memory.outputs import view_of
from torch_overlay._inductor.relaunch.numbers.traced import Escaped
from torch_overlay._inductor.relaunch.numbers.words import another
from torch_overlay._inductor.relaunch.proof.nodes import Refusal
from torch_overlay._inductor.relaunch.sizes.any_size import Seen


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.call_keys import CallKeys
    from torch_overlay._inductor.relaunch.compiled_region import CompiledRegion
    from torch_overlay._inductor.relaunch.states import States

MOST_SEEN = 4
FAILURES = 3  # so many tries may fail
ANY = object()  # in the key of a graph for any size


class Runner(Protocol):
    """The runner of a region, as far as it is asked here."""

    region: CompiledRegion
    keys: CallKeys
    states: States
    plan: Plan | None
    any_size: AnySizeGraph

    @property
    def region_graphs(self) -> Graphs: ...


class Graphs(Protocol):
    def add(self, key: Any, made: Relaunch, nodes: int) -> Any:
        """Keep a graph as that of a new state, and return the state."""


class AnySizeGraph:
    """The graph for any size of a region. `varied`: positions of the sizes that it computes with. `key_of(inputs)`: the
    key of its state among the runner's, made of all other numbers; None as long as there is no graph. `why_not`: why
    the latest try has failed; after `FAILURES` of them there are no more."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []  # calls of different sizes, the first ones
        self.calls_operators = False  # as far as calls have shown
        self.frees_inputs = False  # likewise, in a backward
        self.varied: frozenset[int] = frozenset()
        self.key_of: Callable[[Sequence[Any]], Any] | None = None
        self.failures = 0
        self.why_not = ""

    def note(self, runner: Runner, inputs: Sequence[Any]) -> None:
        """Note the sizes of a call. Those of calls with tensors that have no address show too little."""
        if len(self.seen) == MOST_SEEN or runner.keys.scalars or runner.keys.seeds or _lack_address(inputs):
            return
        numbers = {k: inputs[k] for k in runner.keys.keyed}
        if _are_integers(numbers) and all(other.numbers != numbers for other in self.seen):
            views = {k: view_of(v) for k, v in enumerate(inputs) if capture.is_region(v)}
            self.seen.append(Seen(numbers, views))

    def note_run(self, operators: int, are_aligned: bool) -> None:
        """Note how many operators a call has called. Generated code calls an operator to copy an input that is not
        aligned: such a call shows nothing."""
        self.calls_operators |= operators > 0 and are_aligned

    def run(self, runner: Runner, key: Any, inputs: list[Any]) -> tuple[Any, ...] | None:
        """Launch the graph, which is made first if it can be. Return None if there is none, if it is not for these
        numbers, or if the size with this key has a graph of its own."""
        own = runner.states.get(key)
        is_known = self.key_of is not None or self.failures < FAILURES
        if not runner.keys.keyed or not is_known or (own is not None and own.relaunch is not None):
            return None
        with runner.region.device.guard():
            if (state := self._state(runner, inputs)) is None:
                return None
            originals = list(inputs)
            clones = runner.region.align(inputs)
            if not clones:
                originals.clear()
            try:
                return runner.region.launch(state.relaunch, inputs, originals, clones)
            except Misaligned:  # what is aligned above, so a number has another outcome
                inputs[:] = originals or inputs
            except RuntimeError as error:
                if launches_of(state.relaunch) or "NodeSetParams" not in str(error):
                    raise
                with runner.states.lock:
                    self.failures, self.key_of = FAILURES, None
                    self._drop(runner)
                self._fail(runner, str(error))
                inputs[:] = originals or inputs
        return None

    def _state(self, runner: Runner, inputs: Sequence[Any]) -> Any:
        key_of = self.key_of  # another thread may drop the graph
        if key_of is not None and (state := runner.states.get(key := key_of(inputs))) is not None:
            runner.states.touch(key)
            return state
        if self.failures >= FAILURES or runner.plan is None or self._obstacle(runner) or _lack_address(inputs):
            return None
        numbers = {k: inputs[k] for k in runner.keys.keyed}
        seen, varied = self._most_different(numbers)
        if seen is None or not (varied > self.varied or (varied == self.varied and not _keys(runner))):
            return None
        if runner.states.has_captured_enough or not _are_integers(numbers) or not capturing.acquire(blocking=False):
            return None
        try:
            return self._make(runner, inputs, seen, varied)
        except (Escaped, Refusal) as error:
            self._fail(runner, str(error))
        except Exception as error:  # for code that uses traced numbers where they are not expected
            self._fail(runner, f"{type(error).__name__}: {error}")
        finally:
            capturing.release()
        return None

    def describe(self, runner: Runner) -> str:
        """Say how a region of several sizes is captured; an empty text if it had one size."""
        if _keys(runner):
            return "one graph serves any size"
        why = self._obstacle(runner) or self.why_not
        return f"each size has a graph of its own: {why}" if why and len(runner.states) > 1 else ""

    def _obstacle(self, runner: Runner) -> str:
        """Say why a graph for any size is not tried; an empty text if nothing prevents it."""
        plan = runner.plan or Plan()
        own = next((key for key in list(runner.states) if not _is_any(key)), ())
        obstacles = {
            "it calls operators, which choose kernels by size": self.calls_operators,
            "it draws random numbers": plan.random,
            "it returns memory that generated code does not allocate": plan.operators or plan.watch or plan.opaque,
            "it frees inputs while it runs, and the launch of a whole graph keeps them": self.frees_inputs,
            "tensors in host memory are in the key": runner.keys.scalars or runner.keys.seeds,
            "a number in the key is no integer": any(type(value) is not int for value in own),
            "torch_overlay.config.cudagraph_executables is 0": not runner.states.sizes.bound,
        }
        return next((why for why, prevents in obstacles.items() if prevents), "")

    def _most_different(self, numbers: Mapping[int, Any]) -> tuple[Seen | None, frozenset[int]]:
        """Return the call that differs in most numbers from a call with these, and the positions of the numbers."""
        best: tuple[Seen | None, frozenset[int]] = None, frozenset()
        for seen in self.seen:
            varied = frozenset([k for k, value in numbers.items() if seen.numbers.get(k, value) != value])
            if len(varied) > len(best[1]):
                best = seen, varied
        return best

    def _make(self, runner: Runner, inputs: Sequence[Any], seen: Seen, varied: frozenset[int]) -> Any:
        assert runner.plan is not None
        region = runner.region
        alignments = [LEAST] * len(inputs)
        for k in region.code.static_inputs:
            if capture.is_region(inputs[k]):
                alignments[k] = min(LEAST, alignment_of(address_of(inputs[k])))
        # Memory of saved outputs is not put together, for a launch could not know how.
        code = dataclasses.replace(region.code, saved_outputs=frozenset(), is_backward=False)
        free = {k: inputs[k] for k in runner.keys.free}
        numbers = free | {k: inputs[k] for k in varied}
        others = {k: another(v) for k, v in free.items()} | {k: seen.numbers[k] for k in varied}
        rest = runner.plan, code, runner.states.sizes, numbers
        work = Work(region.device, region.model, inputs, alignments, *rest)
        arrangement, (launcher,), sized = make_graph_for_any_size(work, Seen(others, seen.views))
        static = region.code.static_inputs
        made = Relaunch(region.device, arrangement.layout, launcher, static, alignments, sized=sized)
        refusals.log.info("%s: a graph of %d nodes for any size", region.code.name, launcher.nodes)
        self.note(runner, inputs)
        others_of = keys.key_of([k for k in runner.keys.keyed if k not in varied], ())
        with runner.states.lock:
            if runner.any_size is not self:  # it was told to forget meanwhile
                return None
            self._drop(runner)
            self.varied, self.key_of, self.why_not = varied, lambda inputs: (ANY, others_of(inputs)), ""
            return runner.region_graphs.add(self.key_of(inputs), made, launcher.nodes)

    def _fail(self, runner: Runner, why: str) -> None:
        refusals.log.info("%s: no graph for any size: %s", runner.region.code.name, why)
        self.failures, self.why_not = self.failures + 1, why

    def _drop(self, runner: Runner) -> None:
        for key in _keys(runner):
            runner.states.drop(key)


def _are_integers(numbers: Mapping[int, Any]) -> bool:
    return all(type(value) is int for value in numbers.values())


def _lack_address(inputs: Sequence[Any]) -> bool:
    """True if one of the tensors is empty, or isn't strided."""
    return any(capture.is_region(value) and not address_of(value) for value in inputs)


def _keys(runner: Runner) -> list[Any]:
    return [key for key in list(runner.states) if _is_any(key)]


def _is_any(key: Any) -> bool:
    return bool(key) and key[0] is ANY
