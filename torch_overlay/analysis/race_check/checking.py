"""Check a function for races as it is compiled (`check`), by running its generated code on a simulated device.

    report = check(fn, x)
    print(report)
    report.raise_if_any()

The function runs in eager, to find what its own synchronisation promises to the code around it, and then compiled.
Around each call, a simulated caller relies on those promises. Before the call, the caller has work on each of its
streams, and writes the inputs and the captured tensors (as an optimizer does) on the current stream; where eager reads
and writes one of them behind its work on a side stream only, so must the compiled code. After the call, it reads
outputs and gradients on the current stream, and joins the other streams first only where eager makes no promise. Then
the caller drops outputs and gradients, so that the next call may reuse their memory.

No GPU is needed, and none is used.
"""

from __future__ import annotations

import contextlib
import functools
import re
import textwrap
from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from torch_overlay import config
from torch_overlay._inductor.streams import lowering
from torch_overlay._stream_handling import handles_streams
from torch_overlay.analysis.race_check.happens_before import analyse, Race
from torch_overlay.analysis.race_check.race_report import assemble, Context, Promises
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.trace import (
    Boundary,
    CALLER,
    HOST,
    Memory,
    Record,
    RecordStream,
    Synchronize,
    Trace,
    View,
)
from torch_overlay.testing import observe, simulated_gpu
from torch_overlay.testing._observe import as_compiled, as_simulated, run_backward


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay.analysis.race_check.race_report import Report
    from torch_overlay.testing import Compiled

_ALIGNED_COPY = re.compile(r"= (copy_if_misaligned|aligned)\(|torch_overlay::align\(\w+, \w+_orig, stream")


@dataclass(frozen=True)
class EagerOrder:
    """The order that eager provides. `promises`: the guarantees after each call (None: not known). `keeps`: captured
    tensors that the caller must not write between calls, because that would race in eager. `recorded_on`: allocation
    streams of outputs on which the caller must call `record_stream`, because the allocator would reuse their memory
    during the caller's reads. `races`: eager's races (approximate with a backward: the engine's accumulation is not
    modelled in full). `written`: the caller's memory that is written, and in which part of a step (None: not known).
    """

    promises: Promises | None = None
    keeps: frozenset[str] = frozenset()
    recorded_on: frozenset[str] = frozenset()
    races: tuple[Race, ...] = ()
    written: frozenset[tuple[str, str]] | None = None


def check(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 2,
    backward: bool = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    compile: bool = True,
    fullgraph: bool = False,
    eager: bool = True,
    devices: int = 1,
    misaligned: bool = True,
    rewrite: Callable[[str], str] | None = None,
) -> Report:
    """Compile `fn`, run it `calls` times on `args` on a simulated device, and report what is not ordered.

    `backward` runs the backward of the outputs after each call. A function that is compiled already runs as it is, and
    so does, with `compile=False`, one that calls compiled functions; any other is compiled by `torch.compile` with
    `mode`, `dynamic`, `options` and `fullgraph`. Without `eager` the function doesn't run in eager: the check then
    assumes that the caller relies on all outputs, gradients and mutated inputs on the current stream. Code that copies
    misaligned inputs is also checked with misaligned inputs, unless `misaligned` is False. If small branches are folded
    into the caller's stream (`torch_overlay.config.fold_branches_below_us`), the program is also compiled and checked
    without folding, as it would run with larger tensors. `rewrite` changes the text of a generated module before it
    runs, to see how the check judges the changed text.

    Only the layout of tensors matters. Without a GPU, make the tensors and the streams of the function, and call
    `check`, inside `torch_overlay.testing.simulated_gpu()`.
    """
    if calls < 1:
        raise ValueError(f"check: calls must be at least 1, got {calls}")
    if not handles_streams():
        raise ValueError(
            "check: needs torch_overlay.config.streams = True, and no FX wrapper (torch._inductor.config): of "
            "upstream's handling it sees no waits"
        )
    with simulated_gpu(devices) as gpu:
        runs = fn
        if compile:
            runs = as_compiled(fn, mode=mode, dynamic=dynamic, options=options, fullgraph=fullgraph)
        args = as_simulated(gpu, args)
        before = EagerOrder()
        notes: list[str] = []
        device = SimulatedDevice(gpu, rewrite=rewrite)
        device.checks_captures = True
        if eager:
            before = _in_eager(device, fn, args, calls, backward, notes)
        device.written.clear()
        device.traces.clear()
        events = frozenset(device.events.values())  # the events that eager code used
        torch._dynamo.reset()
        with observe() as seen, device, _watched_folding() as folded:
            device.seen = seen
            run = functools.partial(_run, device, runs, args, calls, backward, before, seen)
            caller = in_each_way(device, run, misaligned)
            if folded:
                notes.append(
                    f"{len(folded)} small branch{'es'[: 2 * (len(folded) != 1)]} run on the caller's stream "
                    "(torch_overlay.config.fold_branches_below_us); checked with that, and without"
                )
                torch._dynamo.reset()
                with config.patch(fold_branches_below_us=0.0):
                    in_each_way(device, run, misaligned)
            context = Context.of(device, caller.current, before.promises, events & set(device.events.values()))
    report = assemble(device.traces, seen, notes, context)
    over = device.written - before.written if before.written is not None else ()
    faults = [f"{name} is written over: the {part} writes it, and eager's does not" for name, part in sorted(over)]
    unaligned = device.taken_for_aligned.items()
    faults += [f"{name} is misaligned, where {kernel} counts on its alignment" for name, kernel in unaligned]
    report = replace(report, faults=tuple(faults))
    if device.ran_backward:
        return replace(report, in_eager=before.races)
    return replace(report, eager_races=before.races)


def idle_or_busy(device: SimulatedDevice, run: Callable[..., Caller]) -> Caller:
    """Run code with busy streams and, if it asks, with idle ones in some of its calls."""
    device.asked_idle = False
    caller = run()
    if device.asked_idle:
        for idle in ((True, True), (True, False), (False, True)):
            run(idle=idle)
    return caller


def in_each_way(device: SimulatedDevice, run: Callable[..., Caller], misaligned: bool = False) -> Caller:
    """Run the compiled code in each applicable mode: idle streams, misaligned inputs, captures."""
    first = len(device.modules)
    device.captures = device.has_partitions = False
    caller = idle_or_busy(device, run)
    if misaligned and any(_ALIGNED_COPY.search(module.original) for module in device.modules[first:]):
        device.misaligned = True
        run()
        device.misaligned = False
    if device.has_partitions:
        device.captures = True
        run()
    return caller


@contextlib.contextmanager
def _watched_folding() -> Iterator[list[int]]:
    """Collect the streams whose branches are folded into the caller's stream inside the context."""
    folded: list[int] = []
    fold = lowering.fold_branches

    def watched(*args: Any, **kwargs: Any) -> list[int]:
        found = fold(*args, **kwargs)
        folded.extend(found)
        return found

    with mock.patch.object(lowering, "fold_branches", watched):
        yield folded


def _in_eager(
    device: SimulatedDevice, fn: Any, args: Sequence[Any], calls: int, backward: bool, notes: list[str]
) -> EagerOrder:
    """Run the function in eager and return the order it provides; an empty order, and a note, if it fails here."""
    try:
        with torch.compiler.set_stance("force_eager"), device:
            caller = _run(device, fn, args, calls, backward, EagerOrder())
            found, promises = analyse(device.trace.operations), _promises(device.trace)
            _run(device, fn, args, calls, backward, EagerOrder())
            promises = _made_twice(promises, _promises(device.trace))
    except Exception as error:
        text = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        notes.append(f"eager's promises are not known, for the function fails there: {text}")
        return EagerOrder()
    names = {name for name, _ in device.captured() if not name.startswith("input")}
    by_caller = [r for r in found.races if CALLER in (r.first.launch.name, r.second.launch.name)]
    keeps = names & {r.second.view.memory.name for r in by_caller}
    taken = [r for r in by_caller if r.kind == "reuse" and r.first.view.memory in caller.outputs]
    races = [r for r in found.races if r.second.view.memory.name not in keeps and r not in taken]
    recorded_on = {r.first.view.memory.stream for r in taken}
    written = frozenset(device.written)
    return EagerOrder(promises, frozenset(keeps), frozenset(recorded_on), tuple(races), written)


def _promises(trace: Trace) -> Promises:
    """Return the promises of the calls of a trace. The host's wait while a constant is copied is no promise of the
    function: compiled code has the constant on the device.
    """
    return analyse(op for op in trace.operations if not (isinstance(op, Synchronize) and op.of_constant)).boundaries


def _made_twice(first: Promises, second: Promises) -> Promises:
    """Return the promises that a second run of the same calls makes, too.

    A function may keep state between runs: events in a log, the position in a ring of buffers. The compiled run finds
    the state of earlier runs, and so does a second run in eager: a promise that depends on that state is no promise.
    """
    both: Promises = {}
    for call in first.keys() & second.keys():
        one, two = first[call], second[call]
        rows = {name: row & two[name] for name, row in one.items() if name in two}
        # If one of the runs doesn't free memory of a pool, the pool is safe in that run.
        rows |= {name: row for name, row in (one | two).items() if name not in rows and name.startswith("free memory")}
        both[call] = rows
    return both


def _run(
    device: SimulatedDevice,
    fn: Callable[..., Any],
    args: Sequence[Any],
    calls: int,
    backward: bool,
    before: EagerOrder,
    seen: Compiled | None = None,
    idle: Sequence[bool] = (False,),
) -> Caller:
    def call(caller: Caller, number: int) -> None:
        caller.prepare(args)
        outputs = fn(*args)
        if backward:
            run_backward(outputs, "check(backward=True)")
        if seen is not None and number == calls:
            seen.output = outputs
        caller.rely(f"call {number}", args, outputs, _gradients(fn, args) if backward else [])

    with device.streams_put_back():  # a function may leave another stream the current one
        return run_calls(Caller(device, before, joins=seen is None), calls, call, idle)


def run_calls(caller: Caller, calls: int, call: Callable[[Caller, int], None], idle: Sequence[bool]) -> Caller:
    """Have a caller make calls, numbered from 1, with streams that are `idle` in some of them, by turns."""
    for number in range(calls):
        caller.device.idle = idle[number % len(idle)]
        call(caller, number + 1)
    return caller


def _gradients(fn: Any, args: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the named leaf tensors that require a gradient: arguments, and parameters of a module."""
    found = [(f"input {i}", t) for i, t in enumerate(pytree.tree_leaves(args)) if isinstance(t, torch.Tensor)]
    if isinstance(fn, torch.nn.Module):
        found += [(name.removeprefix("_orig_mod."), p) for name, p in fn.named_parameters()]
    return [(name, t) for name, t in found if t.is_leaf and t.requires_grad]


class Caller:
    """The simulated code around a call: it does everything that eager allows it to do."""

    def __init__(self, device: SimulatedDevice, before: EagerOrder, joins: bool) -> None:
        device.begin()
        self.device, self.before, self.joins = device, before, joins
        self.current = device.current()  # its current stream after the last call
        self.outputs: set[Memory] = set()
        self.work: dict[str, Memory] = {}  # stream -> memory that the caller writes on it

    @property
    def trace(self) -> Trace:
        return self.device.trace

    def prepare(self, args: Any) -> None:
        """Launch the caller's own work on every stream, then write captured tensors and the inputs."""
        self.device.mode.made_up.begin()
        self.work_on_streams()
        self.device.before_backward = self.work_on_streams
        with self.device.pause():
            tensors = _tensors(args)
            for index, tensor in enumerate(tensors):
                self.device.memory(tensor, f"input {index}")
            for name, memory in self.device.captured():
                if name not in self.before.keeps and not name.startswith("input"):
                    self.trace.launch(CALLER, memory.stream, [], [memory], site=CALLER)
            for stream in dict.fromkeys(self.device.place(t) for t in tensors):
                mine = [t for t in tensors if self.device.place(t) == stream]
                self.device.launch(CALLER, stream, [], mine, line="")
            for event in pytree.tree_leaves(args):
                if isinstance(event, torch.Event):  # the function waits for it
                    self.trace.add(Record(self.device.event_name(event), self.device.current(), CALLER))

    def work_on_streams(self) -> None:
        for stream in self.device.public:
            if stream not in self.work:
                self.work[stream] = Memory(f"the caller's work on {stream}", 1, stream)
            self.trace.launch(CALLER, stream, [], [self.work[stream]], site=CALLER)

    def rely(self, call: str, args: Any, outputs: Any, gradients: Sequence[tuple[str, Any]]) -> None:
        """Add a boundary after `call`, then use the results as eager's promises allow, and drop the gradients."""
        named = [(f"output {i}", t) for i, t in enumerate(_tensors(outputs))]
        named += [(f"input {i}", t) for i, t in enumerate(_tensors(args))]
        named += [(f"gradient of {name}", t.grad) for name, t in gradients if t.grad is not None]
        self.current = self.device.current()
        with self.device.pause():
            self.device.sweep()
            views = {name: self.device.view(t) for name, t in named}
            known = {view.memory for view in views.values()}
            captured = {name: memory for name, memory in self.device.captured() if memory not in known}
            views |= {name: View(memory) for name, memory in captured.items()}
            views |= {memory.name: View(memory) for memory in self.work.values()}
            current = {name: self.device.place(t) for name, t in named}
            events, copies = self.events(outputs), self.device.misaligned
            self.trace.add(Boundary(call, tuple(views.items()), self.device.public, events, copies))
            # The caller reads results, and before the next call it writes to inputs and captured tensors.
            written = {name: memory.stream for name, memory in captured.items() if name not in self.before.keeps}
            promised = all(self.promised(call, name, stream) for name, stream in [*current.items(), *written.items()])
            if self.joins or not promised:  # the host waits for all streams, where nothing is promised
                self.trace.add(Synchronize(streams=tuple(self.device.streams.values()), site=CALLER))
            for stream in dict.fromkeys(current.values()):
                read = [t for name, t in named if current[name] == stream]
                self.device.launch(CALLER, stream, read, [], line="")
            outputs = {views[name].memory: current[name] for name in views if name.startswith("output")}
            self.outputs |= outputs.keys()
            for memory, stream in outputs.items():
                if memory.stream in self.before.recorded_on and stream != HOST:
                    self.trace.add(RecordStream(memory, stream, CALLER))
            for _, tensor in gradients:
                tensor.grad = None

    def events(self, outputs: Any) -> tuple[tuple[str, str], ...]:
        """Label the returned events, then all events; the caller's are the same in eager and compiled code."""
        returned = [v for v in pytree.tree_leaves(outputs) if isinstance(v, torch.Event)]
        found = [(f"event {i} of the output", self.device.event_name(event)) for i, event in enumerate(returned)]
        return (*found, *((name, name) for name in self.device.events.values()))

    def promised(self, call: str, name: str, stream: str) -> bool:
        promises = self.before.promises
        if promises is None or name not in promises.get(call, {}):
            return not name.startswith("output") or stream != HOST
        reliance = promises[call][name]
        reads = name.startswith(("output", "gradient of "))
        return stream in (reliance.readable if reads else reliance.writable)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


__all__ = ["check", "Context"]
