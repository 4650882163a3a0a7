"""Serves the calls of a compiled region, by a graph or as compiled.

The key of a call is made of the inputs that are not tensors on the device (`CallKeys`), and each key has a state
(`states`). The first rule that applies serves a call; calls that run as compiled count by their cause (`causes`).

    rule                                                           action                              cause
    the only state needs no key, and its graph can be launched     launch it (`launch`)
    the state of the key has a graph                               launch it
    the caller captures, or a launch is under way in this thread   run as compiled                     callers-capture
    the region was captured for too many keys                      run as compiled                     templates
    the state was refused                                          run as compiled                     of the refusal
    the first call of the key in this thread                       run as compiled                     warm-up
    a branch of the region was never run (`capture.branches`)      run as compiled                     warm-up
    the key is one of several, and can't pay yet (`governor`)      run as compiled                     size-waits
    the key is one of several, and gets a graph at its next call   run as compiled                     warm-up
    a number of the key is unfit for the graph                     run as compiled                     number
    another thread captures, or has dropped the graph              run as compiled                     busy
    otherwise                                                      capture (`region_graphs`), launch

In the first call of a key, libraries and Triton choose their kernels, and the plan of the capture is observed
(`observe`): which allocations become outputs, which inputs are seeds of attention or are freed, whether random
numbers are drawn. The first one with some sizes is observed in full. The allocations of a further one, or of one in
another thread, are the same; which inputs are large is not. Where most keys get no graph, one is observed just before
its capture. Code that runs as compiled runs as steps of C, if it can (`steps`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_overlay import config
from torch_overlay._inductor.relaunch import attention_seeds, governor, keys, runners
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import (
    AllocationObserver,
    AllocationPlan,
    namespace_of,
    observed,
    storages,
    Watch,
)
from torch_overlay._inductor.relaunch.capture.branches import NeverRun
from torch_overlay._inductor.relaunch.compiled_region import address_of, CompiledRegion
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.launch.relaunch import Misaligned
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped
from torch_overlay._inductor.relaunch.region_graphs import RegionGraphs
from torch_overlay._inductor.relaunch.runners import listen
from torch_overlay._inductor.relaunch.states import CallKeys, States
from torch_overlay.csrc import DriverError


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.states import State
    from torch_overlay._inductor.relaunch.verify import Launchable


COPY_SETTER = "cuGraphExecMemcpyNodeSetParams"  # Note [The memory that a memcpy node was made for] of `executable`
LARGE = 1 << 20  # bytes; for an input of at least this size, it is noted whether it is freed during the run


class Run(NamedTuple):
    """A run of a region as compiled, and what it showed. `seeds`: positions of inputs that are seeds of attention."""

    result: Any
    plan: AllocationPlan
    seeds: frozenset[int] = frozenset()


def observe(region: CompiledRegion, inputs: list[Any]) -> Run:
    """Run a region without a graph, and note what the run shows."""
    given, with_run = storages(inputs), _before(region, inputs)
    at = {v.data_ptr(): k for k, v in enumerate(inputs) if attention_seeds.may_be_seed(v)}
    observer = AllocationObserver()
    namespace = namespace_of(region.model)
    watch = Watch(observer, tuned_in=namespace)
    with observed(namespace, observer), attention_seeds.noted() as noted, watch:
        result = region.run("warm-up", inputs, code=region.model)
    made = storages([v for v in result if capture.is_region(v)] if isinstance(result, (list, tuple)) else result)
    # An input may have been freed by now, and the region may have allocated at its address.
    fresh = [address for address in made if address not in given or address in observer.last]
    plan = observer.learned(fresh, with_run(AllocationPlan()))
    seeds = frozenset([at[address] for address in noted & at.keys()])
    return Run(result, plan, seeds)


def repeat(region: CompiledRegion, inputs: list[Any], known: AllocationPlan) -> Run:
    """Run a region of which an observed run has shown `known`."""
    with_run = _before(region, inputs)
    return Run(region.run("warm-up", inputs), with_run(known))


def _before(region: CompiledRegion, inputs: Sequence[Any]) -> Callable[[AllocationPlan], AllocationPlan]:
    """Return a function that adds to a plan, after a run, which large inputs of a backward it has freed, and
    whether it advanced the generators. A graph of a forward doesn't depend on the inputs that are freed."""
    drawn = [(generator, generator.get_offset()) for generator in region.device.generators(inputs)]
    found = [(k, v.untyped_storage()) for k, v in enumerate(inputs) if region.code.is_backward and address_of(v)]
    held = [(k, StorageWeakRef(storage)) for k, storage in found if storage.nbytes() >= LARGE]

    def with_run(plan: AllocationPlan) -> AllocationPlan:
        dying = frozenset([k for k, ref in held if ref.expired()])
        random = any(generator.get_offset() != before for generator, before in drawn)
        return dataclasses.replace(plan, dying=dying, random=random)

    return with_run


class Runner:
    """Runs the calls of a region. `plan`: that of the latest size that was observed."""

    def __init__(self, model: Callable[[list[Any]], Any], code: CodeFacts, device: Cuda | None = None) -> None:
        if device is None:
            from torch_overlay._inductor.relaunch.capture import device as devices

            device = devices.Cuda(code.device)
        self.code = code
        self.region = CompiledRegion(model, code, device)
        self.keys = CallKeys(code)
        self.states = States(config.cudagraph_templates)
        self.region_graphs = RegionGraphs(self.region, self.states, self.keys)
        self.plan: AllocationPlan | None = None
        self.compiled: Any = None  # coverage.CompiledCode
        self.outside, self.refusals = self.region.outside, self.region_graphs.refusals
        self.governor, self.launched, self.graphs = self.region.governor, self.states.launched, self.states.graphs
        self.never_run = NeverRun(model)
        self.has_large = False  # a tensor in host memory was too large for a key; that is reported once
        self._current, self._is_capturing = device.current, device.is_capturing
        runners.known.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        try_launch = self.states.try_launch
        if try_launch is not None and (result := try_launch(inputs)) is not None:
            return result
        return self._find_and_launch(inputs)

    def _find_and_launch(self, inputs: list[Any]) -> Any:
        call_keys, states = self.keys, self.states
        if call_keys.seeds:
            call_keys.place_seeds(inputs, self.region.device)
        key_of = call_keys.key_of
        if key_of is None:
            key_of = call_keys.choose(inputs)
        state = states.get(key := key_of(inputs))
        if state is not None:
            state.used = states.now()
            if (relaunch := state.relaunch) is not None:
                if (try_launch := relaunch.try_launch) is not None:
                    if (result := try_launch(inputs)) is not None:
                        return result
                elif self._current() == self.code.device and not self._is_capturing() and not executable.launching():
                    try:
                        return relaunch.launch(inputs)
                    except Misaligned:
                        pass
                    except DriverError as error:  # the list of inputs is empty: this call fails, and no later one
                        if error.function == COPY_SETTER:
                            self.region_graphs.give_up(state, error)
                        raise
        return self._run_without_graph_yet(key, state, inputs)

    def _run_without_graph_yet(self, key: Any, state: State | None, inputs: list[Any]) -> Any:
        run = self.region.run
        if self._is_capturing() or executable.launching():
            return run("callers-capture", inputs)  # or in a finalizer that runs during a launch
        if state is None:
            if (state := self.states.add(key)) is None:
                return run("templates", inputs)
            if keys.LARGE in key:
                self._refuse_host_tensor(state, inputs)
        if state.refused:
            return run(state.refused, inputs)
        state.calls += 1
        if threading.get_ident() not in state.warm_in:
            return self._warm_up(key, state, inputs)
        if state.relaunch is None and self.never_run.wait():
            return run("warm-up", inputs)
        may_wait = state.relaunch is None and self._has_to_earn(state)
        if may_wait and not self.governor.affords_capture(state.waited, self.launched):
            return run("size-waits", inputs, state)
        if state.plan is None:
            return self._warm_up(key, state, inputs, is_first=False)
        with self.region.device.guard():
            return self._by_graph(key, state, inputs)

    def _has_to_earn(self, state: State) -> bool:
        """True if a size may have to wait. A process that verifies launches captures each size at once."""
        return governor.has_to_earn(len(self.states), state.calls) and not self.region_graphs.verify

    def _by_graph(self, key: Any, state: State, inputs: list[Any]) -> Any:
        """Launch the state's graph, which is made first if there is none for the alignments of these inputs."""
        originals, run = list(inputs), self.region.run
        clones = self.region.align(inputs)
        try:
            ready = state.update_alignments(inputs, self.code.static_inputs)
            ready = ready or self.region_graphs.make(key, state, inputs)
        except NumberEscaped as escaped:
            self._keep_in_key(escaped.positions, str(escaped))
            inputs[:] = originals
            return self._find_and_launch(inputs)
        if not ready or (relaunch := state.relaunch) is None:  # None: another thread has dropped it
            inputs[:] = originals
            return run(state.refused or "busy", inputs)
        launches = launches_of(relaunch)
        untried = not launches and may_be_refused(relaunch, self.never_run.branches)
        if not clones and not untried:
            originals.clear()  # or this frame would keep inputs alive that a launch in stages is to free
        try:
            start = time.perf_counter()
            result = self.region.launch(relaunch, inputs, originals, clones)
            self.governor.note_first_launch(time.perf_counter() - start)
            return result
        except Misaligned:  # what is aligned above, so a number is unfit
            inputs[:] = originals or inputs
            return run("number", inputs)
        except RuntimeError as error:
            is_refused = untried or getattr(error, "function", "") == COPY_SETTER
            if isinstance(error, torch.OutOfMemoryError) or not is_refused:
                if untried:
                    self.states.set_graph(state)  # the next one is the first launch
                raise
            self.region_graphs.give_up(state, error)
            has_run = bool(self.code.mutated_inputs) and launches_of(relaunch) != launches
            if has_run or not (originals or inputs):
                raise  # what has run may have written to inputs, or freed them
            inputs[:] = originals or inputs
            return run(state.refused, inputs)

    def _warm_up(self, key: Any, state: State, inputs: list[Any], is_first: bool = True) -> Any:
        """Run the region as compiled for the first time with these sizes, or in this thread, and note what it shows.
        One of several sizes may get no graph: the first call notes nothing, and there is another when it gets one."""
        plan = self.plan  # another thread may forget it
        if is_first and plan is not None and self._has_to_earn(state):
            state.warm_in.add(threading.get_ident())
            return self.region.run("warm-up", inputs)
        listen()
        self.region.device.prepare()
        if plan is not None:
            run = repeat(self.region, inputs, state.plan or plan)
        else:
            run = observe(self.region, inputs)
            self._learn_seeds(key, state, run.seeds)
            self.plan = run.plan
        state.plan = run.plan
        state.warm_in.add(threading.get_ident())
        return run.result

    def _refuse_host_tensor(self, state: State, inputs: Sequence[Any]) -> None:
        state.refused = "host-tensor"
        if not self.has_large:
            self.has_large = True
            scalars = (k for k in self.keys.keyed if k in self.keys.scalars)
            k = next(k for k in scalars if keys.host_value(inputs[k]) is keys.LARGE)
            message = f"input {k} is a tensor of {inputs[k].numel()} values in host memory"
            message += ", which the graph would hold; move it to the device"
            self.region_graphs.refuse(state, "host-tensor", message)

    def _learn_seeds(self, key: Any, state: State, found: Collection[int]) -> None:
        """Add the inputs that the first run for a key showed to be seeds. They are taken out of the key, and the state
        is kept under the shorter key."""
        call_keys, states = self.keys, self.states
        with states.lock:
            if call_keys.seeds.issuperset(found):
                return
            call_keys.seeds, states.try_launch = call_keys.seeds.union(found), None
            if call_keys.seeds.isdisjoint(call_keys.keyed):
                return
            if states.get(key) is state:
                states.replace({call_keys.drop_seeds(key): state})
            else:  # it was dropped meanwhile
                states.replace({})
                call_keys.key_of = None

    def _keep_in_key(self, positions: Collection[int], why: str) -> None:
        """Put numbers into the key. All that was made without them is dropped."""
        with self.states.lock:
            self.keys.keep(positions, why)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs; the next call is a first call again."""
        with self.states.lock:
            dropped = self.states.forget()
            self.keys.key_of = self.plan = None
        dropped.clear()

    def describe_sizes(self) -> str:
        """Say how the region runs at further sizes, if it had several."""
        steps = self.region.steps
        if len(self.states) < 2 or not (steps.runs or steps.why_not):
            return ""
        way = f"as it is: {steps.why_not}" if steps.why_not else "as steps of C"
        return f"a size without a graph runs {way}"


def may_be_refused(relaunch: Launchable, branches: Sequence[Any]) -> bool:
    """True if the graph has memcpy nodes to patch, or conditional nodes: the driver may refuse to patch them, and only
    the first launch shows that."""
    return any(branches or stage.has_copies for stage in relaunch.stages)


def launches_of(relaunch: Launchable) -> int:
    return sum(stage.totals[0] for stage in relaunch.stages)
