"""Runs a compiled region at its first call, captures it as a graph at the second, and launches the graph from then on.

    call 1   of a key, in a thread: the region runs as compiled, and libraries and Triton choose their kernels
    call 2   the region is captured (`capture`), and the graph is launched
    call n   the graph is launched (`relaunch`)

A region whose kernels are all Triton's gets a graph for any size at the first call with a second size
(`any_size_graphs`).

The key of a call is made of the inputs that are not tensors on the device (`keys`). Each key has its own `State`; the
least recently used state is dropped when there are too many. Seeds of attention are in no key, whether they are on the
host or on the device: Note [Seeds of attention] of `attention_seeds`.

Note [Numbers that are parameters]
A number that no tensor's size or stride depends on is left out of the key: the graph computes with the number of each
launch (`numbers`). If a capture shows that the region uses the number for anything else, the number is put into the key
(`kept`), and the region begins anew.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from typing import Any, TYPE_CHECKING, TypeAlias

import torch
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch import alignment, attention_seeds, keys, refusals, split_off
from torch_overlay._inductor.relaunch.alignment import address_of, alignment_of, clone_flat, copy_back, LEAST
from torch_overlay._inductor.relaunch.any_size_graphs import AnySizeGraph
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import namespace_of, observed, Observer, Plan, storages, Watch
from torch_overlay._inductor.relaunch.capture.blame import find_culprit, find_launcher
from torch_overlay._inductor.relaunch.capture.culprit import Culprit, line_of_error, other_threads_run
from torch_overlay._inductor.relaunch.capture.make_graph import capturing, make_graph, Work
from torch_overlay._inductor.relaunch.launch import launcher, memcpy_nodes, relaunch, staged
from torch_overlay._inductor.relaunch.launch.native_call import Misaligned
from torch_overlay._inductor.relaunch.launch.relaunch import launching
from torch_overlay._inductor.relaunch.launch.staged import Graph, graph_of, launches_of, stages_of
from torch_overlay._inductor.relaunch.numbers.traced import Escaped, NUMBERS
from torch_overlay._inductor.relaunch.on_reset import listen, on_reset
from torch_overlay._inductor.relaunch.proof.nodes import Refusal
from torch_overlay._inductor.relaunch.sizes.sizes import Sizes
from torch_overlay._inductor.relaunch.verify import Verified


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch_overlay._inductor.relaunch.compiled_code import Code
    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch
    from torch_overlay._inductor.relaunch.launch.staged import Split

    Clones: TypeAlias = "list[tuple[int, torch.Tensor, torch.Tensor]]"

LARGE = 1 << 20  # bytes; for an input of at least this size, it is noted whether it is freed during the run
TABLES = 4  # so many times more sizes are kept if they share executables
FAILURES = 3  # so many captures of a key may fail for another reason than a refusal

live_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


class State:
    """The state of a region for one key: its plan for a capture, the alignments of its inputs, its graph."""

    def __init__(self) -> None:
        self.warm_in: set[int] = set()  # threads that ran it; libraries keep some of their choices per thread
        self.plan = Plan()
        self.alignments: dict[int, int] = {}
        self.failures = 0
        self.refused = ""  # code of the cause, if it gets no graph
        self.relaunch: Relaunch | Split | Verified | None = None
        self.shared: Any = None  # what its executable is shared by, if it is
        self.spent = 0.0  # seconds of the host in calls that waited for a capture
        self.alone = False  # the driver can't set the shared executable's nodes to this graph's


class _Held:
    """The storages of a region's inputs, before a run that may free them."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        tensors = [(k, v) for k, v in enumerate(inputs) if address_of(v)]
        self._refs = {k: StorageWeakRef(v.untyped_storage()) for k, v in tensors}
        self._large = [k for k, v in tensors if v.untyped_storage().nbytes() >= LARGE]

    def are_freed(self) -> bool:
        return any(ref.expired() for ref in self._refs.values())

    def freed_large(self) -> frozenset[int]:
        return frozenset([k for k in self._large if self._refs[k].expired()])


class Runner:
    def __init__(self, model: Callable[[list[Any]], Any], code: Code, device: Any = None) -> None:
        if device is None:
            from torch_overlay._inductor.relaunch.capture.device import Cuda

            device = Cuda(code.device)
        self.model, self.code, self.device = model, code, device
        self.bound = config.cudagraph_templates
        self.verify = config.cudagraph_verify
        self.named = config.nvtx is True
        self.states: OrderedDict[Any, State] = OrderedDict()
        self.lock = threading.RLock()  # a finalizer may come here while it is held
        self.key_of: Callable[[Sequence[Any]], Any] | None = None
        self.keyed: tuple[int, ...] = ()  # positions of the inputs that are in a key: numbers, then scalars
        self.scalars: frozenset[int] = frozenset()  # positions of tensors in host memory
        self.has_large = False  # a tensor in host memory was too large for a key; that is reported once
        self.seeds: frozenset[int] = frozenset()  # positions of seeds of attention
        self.free: tuple[int, ...] = ()  # positions of numbers that are in no key
        self.kept: dict[int, str] = {}  # numbers that had to be put into the key, and why
        self.sizes = Sizes(config.cudagraph_executables)
        self.any_size = AnySizeGraph()
        self.plan: Plan | None = None  # that of the latest size that was observed
        self.captures = 0
        self.warm_ups = 0  # since the last capture
        self.seen: OrderedDict[Any, bool] = OrderedDict()  # keys that came once, when most come only once
        self._is_current = device.current, device.index, device.is_capturing
        self.attempt: Callable[[list[Any]], Any] | None = None  # that of the only state, if the region needs no key
        self.compiled: Any = None  # coverage.CompiledCode
        self.outside: Counter[str] = Counter()  # calls that ran as compiled, by the code of the cause
        self.refusals: dict[str, refusals.Refused] = {}  # the last one of each code
        self._launched_before = 0  # launches of graphs that are dropped
        self._known_to_fail = frozenset(split_off.failed())  # operators that the code was compiled without
        live_runners.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        attempt = self.attempt
        if attempt is not None and (result := attempt(inputs)) is not None:
            return result
        return self._by_key(inputs)

    def _by_key(self, inputs: list[Any]) -> Any:
        if self.seeds:
            self._place_seeds(inputs)
        key_of = self.key_of
        if key_of is None:
            key_of = self.key_of = self._make_key(inputs)
        state = self.states.get(found := (key := key_of(inputs)))
        if state is None and (key_of := self.any_size.key_of) is not None:
            state = self.states.get(found := key_of(inputs))
        if state is not None and (relaunch := state.relaunch) is not None:
            if len(self.states) > 1:
                self.touch(found)
            if (attempt := relaunch.attempt) is not None:
                if (result := attempt(inputs)) is not None:
                    return result
                return self._slow(key, inputs)
            current, index, is_capturing = self._is_current
            if current() == index and not is_capturing() and not launching():
                try:
                    return relaunch.launch(inputs)
                except Misaligned:
                    pass
        return self._slow(key, inputs)

    def _outside(self, cause: str, inputs: list[Any]) -> Any:
        """Run the region as compiled, and count the cause."""
        self.outside[cause] += 1
        return self.plain(inputs)

    def plain(self, inputs: list[Any]) -> Any:
        """Run the region as compiled. Compiled code aligns the inputs that it only reads; the ones that it writes are
        aligned here."""
        clones = self.align(inputs, self.code.mutated_inputs)
        result = self.model(inputs)
        for _, original, clone in clones:
            copy_back(original, clone)
        return result

    def align(self, inputs: list[Any], positions: Sequence[int]) -> Clones:
        """Replace each input at `positions` that isn't aligned to 16 bytes by a copy, since compiled code can't use it.
        Static inputs stay: the region was compiled for their alignment. Return (position, original, copy) of each."""
        clones = []
        for k in positions:
            value = inputs[k]
            if k not in self.code.static_inputs and address_of(value) % LEAST:
                inputs[k] = clone_flat(value)
                clones.append((k, value, inputs[k]))
        return clones

    # -- keys, states, and how a state gets its graph

    def _make_key(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        could_be = {range(len(inputs))[k] for k in self.code.numbers}.difference(self.kept)
        self.free = tuple([k for k in sorted(could_be) if type(inputs[k]) in NUMBERS])
        left_out = self.seeds.union(self.free)
        others = [k for k, value in enumerate(inputs) if not capture.is_region(value) and k not in left_out]
        scalars = [k for k in others if isinstance(inputs[k], torch.Tensor)]
        numbers = [k for k in others if k not in scalars]
        self.keyed, self.scalars = (*numbers, *scalars), frozenset(scalars)
        return keys.key_of(numbers, scalars)

    def _place_seeds(self, inputs: list[Any]) -> None:
        """Move seeds to the device that are in host memory because the forward ran as compiled."""
        on_host = [k for k in self.seeds if not capture.is_region(inputs[k])]
        if on_host and not self.device.is_capturing():
            for k in on_host:
                inputs[k] = attention_seeds.to_device(inputs[k], self.device.device)

    def _learn_seeds(self, key: Any, state: State, found: Collection[int]) -> None:
        """Add the inputs that the first run for a key showed to be seeds. They are taken out of the key, and the state
        is kept under the shorter key."""
        with self.lock:
            if self.seeds.issuperset(found):
                return
            self.seeds = self.seeds.union(found)
            self.attempt = None
            kept = [i for i, k in enumerate(self.keyed) if k not in self.seeds]
            if len(kept) == len(self.keyed) or self.states.get(key) is not state:
                return
            self.states = OrderedDict({tuple(key[i] for i in kept): state})
            self.keyed = tuple(self.keyed[i] for i in kept)
            self.scalars = self.scalars.intersection(self.keyed)
            numbers, scalars = ([k for k in self.keyed if (k in self.scalars) is among] for among in (False, True))
            self.key_of = keys.key_of(numbers, scalars)

    def _keep_in_key(self, positions: Collection[int], why: str) -> None:
        """Put numbers into the key, all of them if it is not known which. All that was made without them is dropped."""
        positions = positions or self.free
        for k in positions:
            message = "%s: each value of the number at input %d gets a graph of its own: %s"
            refusals.log.info(message, self.code.name, k, why)
        with self.lock:
            self.kept |= dict.fromkeys(positions, why)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs; the next call is a first call again."""
        with self.lock:
            self._launched_before = self.launched()
            states, self.states = self.states, OrderedDict()
            self.key_of = self.attempt = self.plan = None
            self.sizes, self.any_size = Sizes(self.sizes.bound), AnySizeGraph()
            self.captures = 0
        states.clear()

    def touch(self, key: Any) -> None:
        with self.lock:
            if key in self.states:
                self.states.move_to_end(key)

    def _state(self, key: Any) -> State | None:
        """Return the state of a key, a new one if it has none; None if it has none and the region was captured too
        often."""
        with self.lock:
            state = self.states.get(key)
            if state is None and not self.has_captured_enough:
                state = self.states[key] = State()
                while len(self.states) > self.bound * (TABLES if self.sizes.executables else 1):
                    _, dropped = self.states.popitem(last=False)
                    self._launched_before += launches_of(dropped.relaunch)
            return state

    def _comes_for_the_first_time(self, key: Any) -> bool:
        """True if so many keys have come in a row without coming again that this one must come twice to be warmed up
        for: to observe a call takes longer than the call, and its state takes the place of one that has a graph."""
        if self.warm_ups < self._most_captures or key in self.states:
            return False
        with self.lock:
            known = self.seen.pop(key, None) is not None
            if not known:
                self.seen[key] = True
                while len(self.seen) > self._most_captures:
                    self.seen.popitem(last=False)
            return not known

    @property
    def _most_captures(self) -> int:
        return 4 * self.bound

    @property
    def has_captured_enough(self) -> bool:
        return self.captures >= self._most_captures

    def _slow(self, key: Any, inputs: list[Any]) -> Any:
        if self.device.is_capturing() or launching():
            return self._outside("callers-capture", inputs)  # or in a finalizer that runs during a launch
        if (result := self.any_size.run(self, key, inputs)) is not None:
            return result
        if self._comes_for_the_first_time(key):
            return self._outside("first-calls", inputs)
        state = self._state(key)
        if state is not None and not state.refused and keys.LARGE in key:
            self._refuse_host_tensor(state, inputs)
        if state is None or state.refused:
            return self._outside(state.refused if state is not None else "templates", inputs)
        if threading.get_ident() not in state.warm_in:
            return self._warm_up(key, state, inputs)
        with self.lock:
            waits = state.relaunch is None and self.sizes.waits(state, self.states.values())
        if waits:
            start = time.perf_counter()
            result = self._outside("size-waits", inputs)
            state.spent += time.perf_counter() - start
            return result
        with self.device.guard():
            originals = list(inputs)
            clones = self.align(inputs, range(len(inputs)))
            try:
                ready = self._is_ready(state, inputs) or self._capture(key, state, inputs)
            except Escaped as escaped:
                self._keep_in_key(escaped.positions, str(escaped))
                inputs[:] = originals
                return self._by_key(inputs)
            if not ready or (relaunch := state.relaunch) is None:  # None: another thread has dropped it
                inputs[:] = originals
                return self._outside(state.refused or "busy", inputs)
            untried = has_copies_never_launched(relaunch)
            if not clones and not untried:
                originals.clear()  # or this frame would keep inputs alive that a launch in stages is to free
            try:
                return self.launch(relaunch, inputs, originals, clones)
            except Misaligned:  # what is aligned above, so a number is unfit
                inputs[:] = originals or inputs
                return self._outside("number", inputs)
            except RuntimeError as error:
                if state.shared is not None and not launches_of(relaunch) and "NodeSetParams" in str(error):
                    refusals.log.info("%s: a size gets an executable of its own: %s", self.code.name, error)
                    state.alone, state.relaunch, state.shared = True, None, None
                    inputs[:] = originals or inputs
                    return self._outside("busy", inputs)
                if isinstance(error, torch.OutOfMemoryError) or not untried:
                    if untried:
                        state.relaunch = None  # the next one is the first launch
                    raise
                self._refuse(state, "host-memory", f"its copies to or from the host can't be patched: {error}")
                inputs[:] = originals
                return self._outside(state.refused, inputs)

    def launch(self, relaunch: Any, inputs: list[Any], originals: Sequence[Any], clones: Clones) -> tuple[Any, ...]:
        result = relaunch.launch(inputs, originals or None)
        for k, original, clone in clones:
            if k in self.code.mutated_inputs:
                copy_back(original, clone)
        return result

    def _refuse(self, state: State | None, reason: str, message: str, operator: str = "", line: str = "") -> None:
        """Refuse, and run the state's calls as compiled from now on. Without a state, only say so."""
        found = self.refusals[reason] = refusals.Refused(self.code, reason, message, operator, line)
        if state is not None:
            with self.lock:
                self._launched_before += launches_of(state.relaunch)
                state.refused, state.relaunch, self.attempt = reason, None, None
        refusals.refuse(found)

    def launched(self) -> int:
        """Return how many calls a graph has run."""
        with self.lock:
            return self._launched_before + sum(launches_of(state.relaunch) for state in self.states.values())

    def graphs(self) -> list[Graph]:
        """Return the graphs that there are now."""
        with self.lock:
            made = [state.relaunch for state in self.states.values() if state.relaunch is not None]
        return list(map(graph_of, made))

    def describe_sizes(self) -> str:
        """Say how the region is captured, if it had several sizes."""
        return self.any_size.describe(self)

    def _refuse_host_tensor(self, state: State, inputs: Sequence[Any]) -> None:
        state.refused = "host-tensor"
        if not self.has_large:
            self.has_large = True
            k = next(k for k in self.keyed if k in self.scalars and keys.host_value(inputs[k]) is keys.LARGE)
            message = f"input {k} is a tensor of {inputs[k].numel()} values in host memory"
            self._refuse(state, "host-tensor", f"{message}, which the graph would hold; move it to the device")

    def _warm_up(self, key: Any, state: State, inputs: list[Any]) -> Any:
        """Run the region as compiled, and note which of its allocations are outputs, and which inputs are seeds."""
        listen()
        self.device.prepare()
        self.any_size.note(self, inputs)
        if self.plan is not None:
            return self._repeat(self.plan, state, inputs)
        given, generators = storages(inputs), self.device.generators(inputs)
        held = _Held(inputs)
        are_aligned = not any(address_of(v) % LEAST for v in inputs)
        drawn = [g.get_offset() for g in generators]
        at = {v.data_ptr(): k for k, v in enumerate(inputs) if attention_seeds.may_be_seed(v)}
        observer, asked = Observer(), {}
        namespace = namespace_of(self.model)
        watch = Watch(observer, self._counted(asked), tuned_in=namespace)
        with observed(namespace, observer), attention_seeds.noted() as noted, watch:
            result = self._outside("warm-up", inputs)
        self._learn_seeds(key, state, {at[address] for address in noted & at.keys()})
        made = storages([v for v in result if capture.is_region(v)] if isinstance(result, (list, tuple)) else result)
        advance = tuple([g.get_offset() - before for g, before in zip(generators, drawn)])
        # An input may have been freed by now, and the region may have allocated at its address.
        fresh = [address for address in made if address not in given or address in observer.last]
        self.any_size.note_run(watch.count, are_aligned)
        base = Plan(asked=asked, **self._freed(held), **_random(advance))
        state.plan = self.plan = observer.plan(fresh, base)
        state.warm_in.add(threading.get_ident())
        self._count_warm_up()
        return result

    def _repeat(self, plan: Plan, state: State, inputs: list[Any]) -> Any:
        """Run the region as compiled for the first time with these sizes, or in this thread. Its allocations are the
        same as with other sizes; which inputs are large is not."""
        generators, held = self.device.generators(inputs), _Held(inputs)
        before = [g.get_offset() for g in generators]
        result = self._outside("warm-up", inputs)
        advance = tuple([g.get_offset() - b for g, b in zip(generators, before)])
        known = state.plan if state.warm_in else dataclasses.replace(plan, asked={})
        state.plan = dataclasses.replace(known, **self._freed(held), **_random(advance))
        state.warm_in.add(threading.get_ident())
        self._count_warm_up()
        return result

    def _freed(self, held: _Held) -> dict[str, Any]:
        """Return the fields of a plan that say which inputs a run has freed."""
        dying, is_backward = held.freed_large(), self.code.is_backward
        self.any_size.frees_inputs |= is_backward and held.are_freed()
        return {"dying": dying, "detail": is_backward and bool(dying)}

    def _count_warm_up(self) -> None:
        self.warm_ups += 1
        if self.warm_ups == self._most_captures:
            message = f"each of {self.warm_ups} calls had sizes or numbers, or a thread, that none of the latest had"
            with self.lock:
                message += "".join(f"; the number at input {k} is no parameter: {why}" for k, why in self.kept.items())
                message += f"; no graph serves any size: {self.any_size.why_not}" if self.any_size.why_not else ""
            self._refuse(None, "first-calls", f"{message}; a graph is made at the second call")

    def _counted(self, asked: dict[int, tuple[int, int]]) -> Callable[[int, Callable[[], Any], bool], Any]:
        """Return a function that runs an operator. If the operator may return new tensors, the function notes in
        `asked` how many allocations it made, and of how many bytes."""

        def run(number: int, call: Callable[[], Any], makes: bool) -> Any:
            before = self.device.allocated() if makes else (0, 0)
            result = call()
            if makes and (now := self.device.allocated()) != before:
                asked[number] = now[0] - before[0], now[1] - before[1]
            return result

        return run

    def _is_ready(self, state: State, inputs: Sequence[Any]) -> bool:
        """True if there is a graph that is valid for the alignments of these inputs. If not, note in `state.alignments`
        for which alignments the next graph has to be captured."""
        ready = had_graph = state.relaunch is not None
        for k, value in enumerate(inputs):
            if capture.is_region(value):
                aligned = alignment_of(address_of(value))
                if aligned < state.alignments.setdefault(k, alignment.FULL):
                    state.alignments[k] = aligned if k in self.code.static_inputs else LEAST
                    ready = False
        if had_graph and not ready:
            moving = (k for k, v in enumerate(inputs) if capture.is_region(v) and k not in self.code.static_inputs)
            state.alignments.update(dict.fromkeys(moving, LEAST))
        return ready

    def _capture(self, key: Any, state: State, inputs: Sequence[Any]) -> bool:
        """Make the state's graph. Return False if this call has to run without one."""
        alignments = [state.alignments.get(k, alignment.FULL) for k in range(len(inputs))]
        numbers = {k: inputs[k] for k in self.free}
        with self.lock:
            is_shared = self.sizes.is_shared(state, self.states.values())
        if not capturing.acquire(blocking=False):
            return False
        rest = state.plan, self.code, self.sizes, numbers, is_shared
        work = Work(self.device, self.model, inputs, alignments, *rest)
        try:
            self.captures += 1
            self.warm_ups = 0
            if state.plan.opaque and not other_threads_run():
                self._blame(state, find_culprit(work, blocking=True))
                if state.refused:
                    return False
            start, kept = time.perf_counter(), len(self.sizes.executables)
            arrangement, launchers = make_graph(work)
            if is_shared:
                self.sizes.note_capture(time.perf_counter() - start)
                if len(self.sizes.executables) == kept:
                    self.captures -= 1  # the bound is for graphs that take memory of the device
            static = self.code.static_inputs
            made = staged.launchable(self.device, arrangement, launchers, static, alignments)
            for launcher in launchers:
                if (patcher := getattr(launcher, "patcher", None)) is not None:
                    patcher.given_up = functools.partial(_give_up, weakref.ref(self), weakref.ref(state))
        except Escaped:
            self.captures -= 1
            raise
        except Refusal as refusal:
            self._blame(state, find_launcher(work, refusal))
            if not state.refused:
                self._refuse(state, refusal.reason, str(refusal))
            return False
        except Exception as error:
            state.failures += 1
            refusals.log.info("%s could not be captured", self.code.name, exc_info=True)
            culprit = find_culprit(work)
            self._blame(state, culprit)
            if not state.refused and state.failures == FAILURES:
                reason = "out-of-memory" if isinstance(error, torch.OutOfMemoryError) else "capture"
                line = culprit.line if culprit else line_of_error(error, namespace_of(self.model) or {})
                operator = culprit.operator if culprit else ""
                self._refuse(state, reason, f"{type(error).__name__}: {error}", operator, line)
            return False
        finally:
            capturing.release()
        nodes = sum(launcher.nodes for launcher in launchers)
        count_capture(nodes)
        if refusals.log.isEnabledFor(logging.INFO):
            message = "%s: a graph of %d nodes in %d launches, which allocate %s; %s"
            what = arrangement.describe(), arrangement.layout.names()
            refusals.log.info(message, self.code.name, nodes, len(launchers), *what)
        with self.lock:
            self._launched_before += launches_of(state.relaunch)
        state.relaunch = self._finished(made)
        state.shared = launchers[0].shared
        self._drop_unkept()
        with self.lock:
            if not key and not self.seeds and self.states.get(key) is state:
                self.attempt = state.relaunch.attempt
        self._say_bound()
        return True

    def _say_bound(self) -> None:
        if self.captures == self._most_captures:
            message = f"{self.captures} captures for different sizes and numbers: no more are made"
            self._refuse(None, "templates", f"{message}; torch_overlay.config.cudagraph_templates sets the bound")

    def add_graph(self, key: Any, made: Relaunch, nodes: int) -> State:
        """Keep a graph that serves calls whose own keys have no state. States that wait for a graph are dropped."""
        count_capture(nodes)
        state = State()
        state.relaunch = self._finished(made)
        with self.lock:
            self.states = OrderedDict({k: s for k, s in self.states.items() if s.relaunch is not None or s.refused})
            self.states[key] = state
            self.captures, self.warm_ups = self.captures + 1, 0
        self._say_bound()
        return state

    def drop(self, key: Any) -> None:
        with self.lock:
            self._launched_before += launches_of(self.states.pop(key).relaunch)

    def _finished(self, made: Relaunch | Split) -> Relaunch | Split | Verified:
        """Return what a call launches: named and verified, as the options say."""
        if self.named:
            stages = stages_of(made)
            for i, stage in enumerate(stages, start=1):
                part = f"stage {i} of {len(stages)}, " if len(stages) > 1 else ""
                nodes = "1 node" if stage.launcher.nodes == 1 else f"{stage.launcher.nodes} nodes"
                name = f"{self.code.name}, {part}graph of {nodes}"
                stage.show(functools.partial(profiler_ranges.within, name))
        return Verified(made, self.plain, self.code, clone_flat) if self.verify else made

    def _drop_unkept(self) -> None:
        """Drop the graphs whose shared executable is kept no longer."""
        with self.lock:
            for state in self.states.values():
                if state.shared is not None and not self.sizes.keeps(state.shared):
                    self._launched_before += launches_of(state.relaunch)
                    state.relaunch = state.shared = None

    def _blame(self, state: State, culprit: Culprit | None) -> None:
        """Have the frame compiled again without the operator; if it can't be, refuse. Note [Operators in which a
        capture failed] of `split_off`"""
        if culprit is None or culprit.is_innocent:
            return
        split_off.remember(culprit.operator, culprit.did)
        message = f"{culprit.operator} {culprit.did}"
        found = refusals.Refused(self.code, "operator", message, culprit.operator, culprit.line)
        if culprit.operator not in self._known_to_fail and split_off.compile_again(self.code.compile_id):
            self.refusals["operator"], state.refused = found, "operator"
            where = f" ({culprit.line})" if culprit.line else ""
            refusals.log.warning("%s%s; from the next call on it runs between two graphs", message, where)
        else:
            self._refuse(state, "operator", message, culprit.operator, culprit.line)


def count_capture(nodes: int) -> None:
    counters["torch_overlay"]["cudagraph_captures"] += 1
    counters["torch_overlay"]["cudagraph_nodes"] += nodes


def _random(advance: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a plan that say how far generators advanced in a run."""
    return {"random": any(advance), "drawn": advance if any(advance) else ()}


def has_copies_never_launched(relaunch: Any) -> bool:
    """True if the graph has memcpy nodes to patch and was never launched: the driver may refuse to patch them, and only
    the first launch shows that."""
    if isinstance(relaunch, Verified):
        return has_copies_never_launched(relaunch.relaunch)
    return not relaunch.totals[0] and bool(memcpy_nodes.moving(relaunch.template))


def _give_up(runner: weakref.ref[Runner], state: weakref.ref[State], why: str) -> None:
    """Drop the state's graph and refuse: from the next call on, the region runs without a graph."""
    owner, found = runner(), state()
    if owner is not None and found is not None:
        owner._refuse(found, "host-memory", why)
    elif found is not None:
        found.refused, found.relaunch = "host-memory", None


@on_reset
def forget_all() -> None:
    """Drop the graphs of all runners. Compiled code may still be referenced, by a backward yet to run, or by Dynamo
    after a graph break: its runners make new ones."""
    for runner in list(live_runners):
        runner.forget()


def live() -> dict[str, int]:
    """Return how many runners, templates, executables and address ranges live."""
    from torch_overlay._inductor.relaunch.capture import recording

    return {
        "runners": sum(bool(runner.states) for runner in list(live_runners)),
        "templates": len(relaunch.live),
        "execs": len({id(each.graph) for each in launcher.live_launchers}),
        "ranges": sum(r.space is not None for r in recording.live_recordings),
    }


def stats() -> dict[str, int]:
    """Return totals over the live graphs."""
    alive = list(relaunch.live)
    return {
        "nodes": sum(r.launcher.nodes for r in alive),
        "nodes_patched": sum(r.totals[1] for r in alive),
        "relaunches": sum(r.totals[0] for r in alive),
    }


def bare_replays() -> list[Callable[[], None]]:
    """Return functions that launch the live graphs without patching any pointer, for benchmarks."""
    return [r.launcher.replay for r in list(relaunch.live) if r.totals[0]]
