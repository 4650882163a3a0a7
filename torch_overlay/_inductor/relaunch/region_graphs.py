"""Makes the graphs of a region, one for a state, and refuses where there can be none.

A capture that fails for an operator has the frame compiled again without it: Note [Operators in which a capture failed]
of `split_off`.

Keeps a region's graph for any size: decides when it is made, and launches it. Note [Graphs for any size] of
`sizes.any_size`

It is made at the first call with a second size. Numbers that were the same in both calls are in its key; when a call
shows another value of one, a new graph takes its place. A size that has a graph of its own keeps it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from typing import Any, Protocol, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch import causes, compiled_region, keys, runners, split_off
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan
from torch_overlay._inductor.relaunch.capture.blame import CaptureFailed, find_differing, make_or_blame
from torch_overlay._inductor.relaunch.capture.make_graph import CaptureRequest, capturing, make_graph_for_any_size
from torch_overlay._inductor.relaunch.compiled_region import address_of, alignment_of, LEAST
from torch_overlay._inductor.relaunch.launch.relaunch import Misaligned, Relaunch
from torch_overlay._inductor.relaunch.launch.staged import graph_of, launches_of
from torch_overlay._inductor.relaunch.memory.outputs import view_of
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped, perturbed
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay._inductor.relaunch.sizes.any_size import Seen
from torch_overlay._inductor.relaunch.states import State
from torch_overlay._inductor.relaunch.verify import Verified, VerifyError
from torch_overlay.csrc import DriverError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.culprit import Culprit
    from torch_overlay._inductor.relaunch.compiled_region import CompiledRegion
    from torch_overlay._inductor.relaunch.launch.staged import Split
    from torch_overlay._inductor.relaunch.states import CallKeys, States


FAILURES = 3  # so many captures of a key may fail for another reason than a refusal


class RegionGraphs:
    """Makes what the states of a region launch. `refusals`: the last one of each code."""

    def __init__(self, region: CompiledRegion, states: States, keys: CallKeys) -> None:
        self.region, self.code, self.states, self.keys = region, region.code, states, keys
        self.verify = config.cudagraph_verify
        self.named = config.nvtx is True
        self.refusals: dict[str, causes.Refused] = {}
        self._known_to_fail = frozenset(split_off.failed())  # operators that the code was compiled without

    def make(self, key: Any, state: State, inputs: Sequence[Any]) -> bool:
        """Make the state's graph from a call with these inputs. Return False if the call has to run without one. Raises
        NumberEscaped if a number has to be in the key."""
        states, sizes = self.states, self.states.sizes
        wanted = dict(state.alignments)  # another thread may lower them meanwhile
        alignments = [wanted.get(k, compiled_region.FULL) for k in range(len(inputs))]
        numbers = {k: inputs[k] for k in self.keys.free}
        rest = state.plan, self.code, sizes, numbers, states.is_shared(state)
        request = CaptureRequest(self.region.device, self.region.model, inputs, alignments, *rest)
        if not capturing.acquire(blocking=False):
            return False
        start = time.perf_counter()
        try:
            states.warm_ups, before = 0, sizes.instantiated
            made = make_or_blame(request)
            if request.plan.opaque:
                self._compare(request, made)
            # The bound is for graphs that take memory of the device.
            states.captures += not request.is_shared or sizes.instantiated > before
        except CaptureFailed as failed:
            states.captures += 1
            self._fail(state, failed)
            return False
        finally:
            capturing.release()
            self.region.governor.note_capture(time.perf_counter() - start)
        launchers = [stage.launcher for stage in made.stages]
        for launcher in launchers:
            if (rebuild := launcher.rebuild) is not None:
                rebuild.give_up = functools.partial(_give_up, weakref.ref(self), weakref.ref(state))
        runners.count_capture(graph_of(made).nodes)
        relaunch = self._finished(made)
        states.set_graph(state, relaunch, launchers[0].shared)
        state.captured_for = wanted
        states.drop_unkept()
        with states.lock:
            states.launched_before -= launches_of(made)  # it was launched to compare it, for no call
            if not key and not self.keys.seeds and states.get(key) is state:
                states.try_launch = relaunch.try_launch
        self._say_bound()
        return True

    def _compare(self, request: CaptureRequest, made: Relaunch | Split) -> None:
        """Raise CaptureFailed if a launch on copies of these inputs has other results than the compiled code: Note
        [Kernels outside of a capture] of `blame`."""
        unwritten = set(self.code.static_inputs).difference(self.code.mutated_inputs)
        shared = {id(request.inputs[k]) for k in unwritten}  # parameters most often, for which there may be no room

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if id(tensor) in shared else compiled_region.clone_flat(tensor)

        counts = counters["torch_overlay"]
        launched = counts["cudagraph_relaunches"]
        try:
            Verified(made, self.region.plain, self.code, clone).check(request.inputs)
        except VerifyError as error:
            causes.log.info("%s: %s", self.code.name, error)
            culprit = find_differing(request)
            raise CaptureFailed("operator", str(error) if culprit is None else culprit.did, culprit) from error
        except torch.OutOfMemoryError as error:
            raise CaptureFailed("out-of-memory", str(error), None, is_final=False) from error
        except Exception as error:  # the call's own launch raises it, too, which `runner` handles
            causes.log.info("%s could not be compared: %s", self.code.name, error)
        finally:
            counts["cudagraph_relaunches"] = launched  # a launch for no call

    def add(self, key: Any, made: Relaunch, nodes: int) -> State:
        """Keep a graph that serves calls whose own keys have no state."""
        runners.count_capture(nodes)
        state = State()
        state.relaunch = self._finished(made)
        self.states.add(key, state)
        self._say_bound()
        return state

    def _finished(self, made: Relaunch | Split) -> Relaunch | Split | Verified:
        """Return what a call launches: named and verified, as the options say."""
        if self.named:
            stages = made.stages
            for i, stage in enumerate(stages, start=1):
                part = f"stage {i} of {len(stages)}, " if len(stages) > 1 else ""
                nodes = "1 node" if stage.launcher.nodes == 1 else f"{stage.launcher.nodes} nodes"
                name = f"{self.code.name}, {part}graph of {nodes}"
                stage.show(functools.partial(profiler_ranges.within, name))
        if self.verify:
            return Verified(made, self.region.plain, self.code, compiled_region.clone_flat)
        made.forget()
        return made

    def _say_bound(self) -> None:
        if self.states.captures == self.states.most_captures:
            message = f"{self.states.captures} captures for different sizes and numbers: no more are made"
            self.refuse(None, "templates", f"{message}; torch_overlay.config.cudagraph_templates sets the bound")

    def refuse(self, state: State | None, reason: str, message: str, **about: str) -> None:
        """Refuse: from now on, run the state's calls as compiled that its graph doesn't serve, if it has one for better
        aligned inputs. Without a state, only say so."""
        found = self.refusals[reason] = causes.Refused.of(reason, message, **about, region=self.code)
        if state is not None:
            state.refused = reason
        causes.refuse(found)

    def give_up(self, state: State, why: str, blocking: bool = True) -> bool:
        """Drop the state's graph, whose copies can't be patched, and refuse. Return False if the lock is not free, and
        not to be waited for."""
        if not self.states.lock.acquire(blocking):
            return False
        try:
            self.states.set_graph(state)
            state.refused = "host-memory"
        finally:
            self.states.lock.release()
        self.refuse(state, "host-memory", why)
        return True

    def _fail(self, state: State, failed: CaptureFailed) -> None:
        """Blame the operator for which there is no graph; otherwise refuse, or let a later call try again."""
        if failed.culprit is not None:
            self._blame(state, failed.culprit)
            return
        state.failures += not failed.is_final
        if failed.is_final or state.failures == FAILURES:
            self.refuse(state, failed.reason, str(failed), operator=failed.operator, line=failed.line)

    def _blame(self, state: State, culprit: Culprit) -> None:
        """Have the frame compiled again without the operator; if it can't be, refuse."""
        split_off.remember(culprit.operator, culprit.did)
        message = f"{culprit.operator} {culprit.did}"
        about = {"operator": culprit.operator, "line": culprit.line}
        if culprit.operator not in self._known_to_fail and split_off.compile_again(self.code.compile_id):
            found = causes.Refused.of("operator", message, **about, region=self.code)
            self.refusals["operator"], state.refused = found, "operator"
            where = f" ({culprit.line})" if culprit.line else ""
            causes.log.warning("%s%s; from the next call on it runs between two graphs", message, where)
        else:
            self.refuse(state, "operator", message, **about)


def _give_up(graphs: weakref.ref[RegionGraphs], state: weakref.ref[State], why: str) -> bool:
    """Drop the state's graph and refuse: from the next call on, the region runs without a graph. This is called in a
    launch, for which a thread may wait in a finalizer while it has the lock of the states: then return False."""
    owner, found = graphs(), state()
    if owner is not None and found is not None:
        return owner.give_up(found, why, blocking=False)
    if found is not None:
        found.refused, found.relaunch = "host-memory", None
    return True


MOST_SEEN = 4
ANY = object()  # in the key of a graph for any size


class RegionRunner(Protocol):
    """The runner of a region, as far as it is asked here."""

    region: CompiledRegion
    keys: CallKeys
    states: States
    plan: AllocationPlan | None
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

    def note(self, runner: RegionRunner, inputs: Sequence[Any]) -> None:
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

    def run(self, runner: RegionRunner, key: Any, inputs: list[Any]) -> tuple[Any, ...] | None:
        """Launch the graph, which is made first if it can be. Return None if there is none, if it is not for these
        numbers, or if the size with this key has a graph of its own."""
        if self.key_of is None and (self.failures >= FAILURES or self.calls_operators):
            return None
        own = runner.states.get(key)
        if not runner.keys.keyed or (own is not None and own.relaunch is not None):
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
            except DriverError as error:
                if launches_of(state.relaunch) or not error.sets_a_node:
                    raise
                with runner.states.lock:
                    self.failures, self.key_of = FAILURES, None
                    self._drop(runner)
                self._fail(runner, str(error))
                inputs[:] = originals or inputs
        return None

    def _state(self, runner: RegionRunner, inputs: Sequence[Any]) -> Any:
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
        start = time.perf_counter()
        try:
            return self._make(runner, inputs, seen, varied)
        except (NumberEscaped, Unprovable) as error:
            self._fail(runner, str(error))
        except Exception as error:  # for code that uses traced numbers where they are not expected
            self._fail(runner, f"{type(error).__name__}: {error}")
        finally:
            capturing.release()
            runner.region.governor.note_capture(time.perf_counter() - start)
        return None

    def describe(self, runner: RegionRunner) -> str:
        """Say how a region of several sizes is captured; an empty text if it had one size."""
        if _keys(runner):
            return "one graph serves any size"
        why = self._obstacle(runner) or self.why_not
        return f"each size has a graph of its own: {why}" if why and len(runner.states) > 1 else ""

    def _obstacle(self, runner: RegionRunner) -> str:
        """Say why a graph for any size is not tried; an empty text if nothing prevents it."""
        plan = runner.plan or AllocationPlan()
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

    def _make(self, runner: RegionRunner, inputs: Sequence[Any], seen: Seen, varied: frozenset[int]) -> Any:
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
        others = {k: perturbed(v) for k, v in free.items()} | {k: seen.numbers[k] for k in varied}
        rest = runner.plan, code, runner.states.sizes, numbers
        request = CaptureRequest(region.device, region.model, inputs, alignments, *rest)
        arrangement, (launcher,), sized = make_graph_for_any_size(request, Seen(others, seen.views))
        made = Relaunch(region.device, arrangement.layout, launcher, alignments, sized)
        causes.log.info("%s: a graph of %d nodes for any size", region.code.name, launcher.nodes)
        self.note(runner, inputs)
        others_of = keys.key_of([k for k in runner.keys.keyed if k not in varied], ())
        with runner.states.lock:
            if runner.any_size is not self:  # it was told to forget meanwhile
                return None
            self._drop(runner)
            self.varied, self.key_of, self.why_not = varied, lambda inputs: (ANY, others_of(inputs)), ""
            return runner.region_graphs.add(self.key_of(inputs), made, launcher.nodes)

    def _fail(self, runner: RegionRunner, why: str) -> None:
        causes.log.info("%s: no graph for any size: %s", runner.region.code.name, why)
        self.failures, self.why_not = self.failures + 1, why

    def _drop(self, runner: RegionRunner) -> None:
        for key in _keys(runner):
            runner.states.drop(key)


def _are_integers(numbers: Mapping[int, Any]) -> bool:
    return all(type(value) is int for value in numbers.values())


def _lack_address(inputs: Sequence[Any]) -> bool:
    """True if one of the tensors is empty, or isn't strided."""
    return any(capture.is_region(value) and not address_of(value) for value in inputs)


def _keys(runner: RegionRunner) -> list[Any]:
    return [key for key in list(runner.states) if _is_any(key)]


def _is_any(key: Any) -> bool:
    return bool(key) and key[0] is ANY
