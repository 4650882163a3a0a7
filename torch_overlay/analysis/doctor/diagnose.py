"""Runs a function for some steps, and says what of it is outside of CUDA graphs, why, and what that costs.

The first half of the steps warms up: graphs are made at the second call of a size. The second half is counted, timed,
profiled, and run once more while torch notes where the host waits. Remedies that are switches are tried (`SWITCHES`).
All runs of a function begin with the same random numbers and the same arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import operator
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch
import torch.utils._pytree as pytree

from torch_overlay._inductor.relaunch import coverage as counts
from torch_overlay._inductor.relaunch.causes import CAUSES
from torch_overlay._inductor.user_lines import is_in_torch
from torch_overlay.analysis.doctor import eager
from torch_overlay.analysis.doctor.diagnosis import (
    Diagnosis,
    DIFFER,
    EQUAL,
    Finding,
    profiled,
    StepTimeline,
    Trial,
    VARY,
    Work,
)
from torch_overlay.analysis.race_check.simulated_operators import nodes_of
from torch_overlay.testing import observe
from torch_overlay.testing._observe import is_compiled, run_backward
from torch_overlay.testing._simulate import active


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.coverage import Coverage, Outside
    from torch_overlay.testing import Compiled

TIMED = 40  # steps, of which the fastest counts: others may use the host meanwhile
HOST_READS = ("split-data-dependent", "split-control-flow")  # causes of work for which the host reads data
LONG = 50.0  # ms; guards don't count in a step that takes longer
DYNAMO, INDUCTOR, OVERLAY = "torch._dynamo.config", "torch._inductor.config", "torch_overlay.config"

# Code of the cause, a part of its message, and the options that may remove it.
SWITCHES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("graph-break", "item", {f"{DYNAMO}.capture_scalar_outputs": True}),
    ("graph-break", "Dynamic shape operator", {f"{DYNAMO}.capture_dynamic_output_shape_ops": True}),
    ("graph-break", "ata dependent operator", {f"{DYNAMO}.capture_scalar_outputs": True}),
    ("inductor", "incompatible op", {f"{INDUCTOR}.graph_partition": True}),
    ("inductor", "mutated inputs", {f"{INDUCTOR}.triton.cudagraph_support_input_mutation": True}),
    ("split-dynamic", "", {f"{INDUCTOR}.triton.cudagraph_skip_dynamic_graphs": False}),
    ("split-small", "", {f"{INDUCTOR}.triton.cudagraph_min_partition_size": 0}),
    ("cpp-wrapper", "", {f"{INDUCTOR}.cpp_wrapper": False}),
    ("templates", "", {f"{OVERLAY}.cudagraph_templates": 1024}),
    ("streams", "", {f"{INDUCTOR}.graph_partition": True}),
    ("split-devices", "", {f"{OVERLAY}.cudagraph_rewrites": True}),
    ("split-host", "", {f"{OVERLAY}.cudagraph_rewrites": True}),
)


def switches(findings: Iterable[Finding]) -> list[tuple[str, dict[str, object]]]:
    """Return (code, options) of each remedy that is a switch and not set yet, the most costly cause first."""
    found: list[tuple[str, dict[str, object]]] = []
    for finding in findings:
        for code, part, options in SWITCHES:
            if finding.code != code or part not in finding.message or options in [known for _, known in found]:
                continue
            if any(getattr(*_option(name)) != value for name, value in options.items()):
                found.append((code, options))
    return found


def _option(name: str) -> tuple[Any, str]:
    """Return the configuration module and the option in it that a full name stands for."""
    module, _, option = name.partition(".config.")
    return importlib.import_module(f"{module}.config"), option


@contextlib.contextmanager
def patched(options: dict[str, object]) -> Iterator[None]:
    """Set options, given by their full names, for the time inside."""
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            module, option = _option(name)
            stack.enter_context(module.patch({option: value}))
        yield


def as_text(options: dict[str, object]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in options.items())


def seed() -> None:
    """Seed the generators of torch, Python and numpy."""
    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(0)


def random_states() -> list[torch.Tensor]:
    """Return the states of torch's generators of the host and of the current device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


class SavedArguments:
    """The memory of arguments, of modules among them as well, kept on the host."""

    def __init__(self, args: Any) -> None:
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for leaf in pytree.tree_leaves(args):
            is_module = isinstance(leaf, torch.nn.Module)
            for tensor in [*leaf.parameters(), *leaf.buffers()] if is_module else [leaf]:
                with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):  # no tensor; a sparse one
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.storages:
                        self.storages[storage._cdata] = storage, storage.cpu().clone()

    def restore(self) -> None:
        """Undo what has been written to them."""
        for storage, copy in self.storages.values():
            if storage.nbytes() == copy.nbytes():  # else the function has changed its size
                storage.copy_(copy)


def diagnose(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    steps: int = 8,
    target: str = "",
    remedy: Callable[..., Any] | None = None,
    tries: bool = True,
    without_graphs: bool = True,
) -> Diagnosis:
    """Run `fn(*args)`, and its backward if that is asked for. A function that is not compiled, and calls no code that
    asks for CUDA graphs, is compiled with them. Inside `simulated_gpu()` it is compiled for the simulated device.

    `steps` (at least 4) are run; half of them warm up. Switches that may help are tried in this process, each from a
    fresh compilation, with the results compared, from the same seeds and arguments; so is `remedy`, the function as the
    caller has changed it; and it is timed without graphs. What is written to arguments is undone. Raises ValueError for
    fewer steps, for a function of which compilation leaves nothing, and what the function raises."""
    if steps < 4:
        raise ValueError(f"steps must be at least 4, got {steps}: graphs are made at the second call")
    simulated = active() is not None
    job = _Job(args, backward, steps, simulated, SavedArguments(() if simulated else args))
    first = job.measure(fn)
    trials: list[Trial] = []
    without = None
    if without_graphs and not job.simulated and first.coverage.functions:
        from torch_overlay import config

        with config.patch(cudagraphs="off"):
            without = job.measure(fn, detail=False).ms
    found = diagnosis(target or name_of(fn), job.simulated, first.coverage, first.findings, job.counted)
    if tries:
        for code, options in switches(found.findings):
            with patched(options):
                trials.append(job.tried(fn, first, found, (code, as_text(options))))
    if remedy is not None:
        code = found.findings[0].code if found.findings else ""
        trials.append(job.tried(remedy, first, found, (code, name_of(remedy))))
    trials = unless_they_vary(
        trials, lambda: compared(first.results, job.measure(fn, detail=False).results, job.simulated)
    )
    job.saved.restore()
    found = dataclasses.replace(
        found,
        ms=first.ms,
        ms_without_graphs=without,
        trials=tuple(trials),
        results=tuple(first.results),
        timeline=first.timeline,
        guards_us=first.guards_us,
    )
    return logged(found) if tries else found


def diagnosis(
    target: str, simulated: bool, coverage: Coverage, findings: Iterable[Finding], steps: int = 1
) -> Diagnosis:
    """Return what was found on the current device in so many steps, the most costly first."""
    findings = tuple(by_cost(findings))
    breaks = sum(finding.code == "graph-break" for finding in findings)
    waits = sum(finding.waits for finding in findings)
    return Diagnosis(
        target,
        f"{torch.cuda.get_device_name()}{' (simulated)' if simulated else ''}",
        simulated,
        coverage.share,
        None,
        None,
        findings,
        coverage=json.loads(coverage.to_json()),
        table=str(coverage).partition("\n\n[")[0] if coverage.functions else "",
        work=Work(waits, coverage.host_launches / steps, breaks, coverage.share),
    )


def logged(found: Diagnosis) -> Diagnosis:
    """Add a diagnosis to torch's structured log, TORCH_TRACE, as an artifact; tlparse shows it. Return it."""
    about = {"name": "torch_overlay_doctor", "encoding": "json"}
    torch._logging.trace_structured("artifact", metadata_fn=lambda: about, payload_fn=found.to_json)
    return found


def name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def unless_they_vary(trials: list[Trial], again: Callable[[], str]) -> list[Trial]:
    """Have no trial say that results differ if those of the unchanged program do, too, when it is run `again`."""
    if not any(trial.results == DIFFER for trial in trials) or again() != DIFFER:
        return trials
    return [dataclasses.replace(t, results=VARY) if t.results == DIFFER else t for t in trials]


def by_cost(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.cost, reverse=True)


class _Measured:
    def __init__(self) -> None:
        self.coverage: Coverage = counts.Coverage(())
        self.findings: list[Finding] = []
        self.ms: float | None = None
        self.guards_us: float | None = None
        self.results: list[torch.Tensor] = []
        self.timeline = StepTimeline()


@dataclass(frozen=True)
class _Job:
    """What is run and measured, of each function in the same way."""

    args: Sequence[Any]
    backward: bool
    steps: int
    simulated: bool
    saved: SavedArguments
    runs: dict[int, Callable[..., Any]] = field(default_factory=dict)  # what is called for a function, by its id

    @property
    def counted(self) -> int:
        return 1 if self.simulated else self.steps - self.steps // 2

    def step(self, run: Callable[..., Any]) -> Any:
        result = run(*self.args)
        if self.backward:
            for node in nodes_of(pytree.tree_leaves(result)):
                if (leaf := getattr(node, "variable", None)) is not None:
                    leaf.grad = None  # to add the new gradient to it would be a launch of eager code
            run_backward(result)
        return result

    def measure(self, fn: Callable[..., Any], detail: bool = True) -> _Measured:
        """Compile anew, warm up, and count and time the steps after that."""
        torch._dynamo.reset()
        found, is_known = _Measured(), id(fn) in self.runs
        with observe() as seen:
            run = self._compiled(fn)
            self.saved.restore()
            seed()
            states = random_states()
            for _ in range(1 if self.simulated else self.steps // 2):
                self.step(run)
            result: Any = None
            before = counts.coverage()
            with eager.watched() as beside:
                for _ in range(self.counted):
                    result = self.step(run)
        found.coverage = dataclasses.replace(counts.coverage().since(before), eager=beside.outside())
        is_empty = not (counts.coverage().functions or found.coverage.eager or seen.graph_breaks)
        if is_empty and run is not fn and not is_known:  # one that is known may be measured without graphs
            if self._calls_compiled_code(fn):
                self.runs[id(fn)] = fn
                return self.measure(fn, detail)
            raise ValueError(
                f"{name_of(fn)} leaves nothing to compile: results that it doesn't return, or that nothing uses, are "
                "not computed; return what it computes"
            )
        lines = beside.waits
        if not self.simulated:
            torch.cuda.synchronize()
            found.results = values_of(result)
            is_random = not all(map(torch.equal, states, random_states()))
            found.ms = _least_ms(lambda: self.step(run))
            found.guards_us = guards_us(lambda: self.step(run), found.ms) if detail else None
            found.timeline = profiled(lambda: self.step(run)) if detail else StepTimeline()
            with eager.noted_waits() as noted:
                self.step(run)
            torch.cuda.synchronize()
            lines |= Counter({line: count * self.counted for line, count in noted.items()})
            if is_random:
                found.results = self._with_numbers_of_eager(run)
        found.findings = findings_of(found.coverage, seen, self.counted, lines, found.timeline.of(beside))
        return found

    def _with_numbers_of_eager(self, run: Callable[..., Any]) -> list[torch.Tensor]:
        """Return the results with eager's random numbers: Inductor's depend on what is compiled together."""
        torch._dynamo.reset()
        self.saved.restore()
        seed()
        result: Any = None
        with torch._inductor.config.patch(fallback_random=True):
            for _ in range(self.steps):
                result = self.step(run)
        return values_of(result)

    def _compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is, if it is compiled or calls code that asks for CUDA graphs; else compiled."""
        if id(fn) not in self.runs:
            self.step(fn)
            if is_compiled(fn) or counts.live:
                self.runs[id(fn)] = fn
            else:
                torch._dynamo.reset()
                self.runs[id(fn)] = torch.compile(fn, mode="reduce-overhead")
        return self.runs[id(fn)]

    def _calls_compiled_code(self, fn: Callable[..., Any]) -> bool:
        torch._dynamo.reset()
        with observe() as seen:
            self.step(fn)
        return bool(seen.frames)

    def tried(self, fn: Callable[..., Any], first: _Measured, found: Diagnosis, what: tuple[str, str]) -> Trial:
        """Try a remedy: the code of its cause and the change are `what`."""
        try:
            after = self.measure(fn, detail=False)
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            return Trial(*what, found.work, None, error=f"{type(error).__name__}: {text}")
        work = diagnosis("", self.simulated, after.coverage, after.findings, self.counted).work
        results = compared(first.results, after.results, self.simulated)
        return Trial(*what, found.work, work, first.ms, after.ms, results)


def _least_ms(step: Callable[[], Any]) -> float:
    taken = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def guards_us(step: Callable[[], Any], ms: float) -> float | None:
    """Return how many microseconds Dynamo's guards take of a step, which took so many milliseconds; None if it is too
    long for them to count, can't do without them, or runs under another stance of the compiler."""
    if ms > LONG or torch._dynamo.eval_frame._stance != torch._dynamo.eval_frame.DynamoStance():
        return None
    try:
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            return max(0.0, 1e3 * (ms - _least_ms(step)))
    except RuntimeError:  # some of its code isn't compiled: torch._dynamo.config.recompile_limit
        return None


def findings_of(
    coverage: Coverage,
    seen: Compiled,
    steps: int,
    lines: Mapping[str, int],
    times: Mapping[Any, tuple[float, float]],
) -> list[Finding]:
    """Return a finding for each cause outside of graphs, each graph break, what was compiled again, and the waits of
    the host by line. `times`: (host us, device us) of a step by operator, or by code and line of eager code; launches
    and waits are divided by `steps`."""
    found = []
    for each in (*coverage.refused, *coverage.outside):
        host, device = times.get((each.code, each.line)) or times.get(each.operator.rpartition(".")[0], (None, None))
        reads = each.calls / steps if _reads(each) else 0.0
        cost = each.kernels / steps, host, device, reads
        found.append(Finding(each.code, each.operator, each.line, each.message, each.remedy, *cost))
    for each in dict.fromkeys(seen.graph_breaks):
        remedy = "" if is_in_torch(each.file) else "; ".join(each.hints) or CAUSES["graph-break"].remedy
        found.append(Finding("graph-break", "", f"{each.file}:{each.line}", each.reason, remedy))
    found += _recompiled(seen)
    for line, count in lines.items():
        known = [i for i, f in enumerate(found) if f.line.partition(": ")[0] == line and not f.code.startswith("eager")]
        if known:
            found[known[0]] = dataclasses.replace(found[known[0]], waits=count / steps)
        else:
            found.append(Finding.of("host-wait", line=line, waits=count / steps))
    return found


def _reads(each: Outside) -> bool:
    """True if the host waits for data in this part of compiled code."""
    name = re.search(r"incompatible op ([\w.]+)", each.message)
    tags = getattr(operator.attrgetter(name[1])(torch.ops), "tags", ()) if name else ()
    return each.code in HOST_READS or not eager.READS.isdisjoint(tags)


def _recompiled(seen: Compiled) -> list[Finding]:
    """Return a finding for each function that Dynamo compiled again, with the reasons and the time."""
    times = Counter((frame.file, frame.line, frame.name) for frame in seen.frames)
    measured = torch._dynamo.utils.get_compilation_metrics()
    found = []
    for (file, line, name), count in times.items():
        mine = [m for m in measured if (m.co_filename, m.co_firstlineno, m.co_name) == (file, line, name)]
        reasons = dict.fromkeys(" ".join(m.recompile_reason.split()) for m in mine if m.recompile_reason)
        if count > 1:
            seconds = sum(m.entire_frame_compile_time_s or 0.0 for m in mine[-count:])
            message = (
                f"{name} was compiled {count} times, in {seconds:.1f} s: {'; '.join(reasons) or 'no reason given'}"
            )
            found.append(Finding.of("recompiled", message, line=f"{file}:{line}"))
    return found


def compared(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], simulated: bool) -> str:
    """Say if results are equal but for the order in which they were computed."""
    if simulated:
        return "not compared (simulated)"
    if not (first or second):
        return "not compared (there are none)"
    are_equal = len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(*_alike(a, b), rtol=1e-2, atol=1e-3, equal_nan=True)
        for a, b in zip(first, second)
    )
    return EQUAL if are_equal else DIFFER


def _alike(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(a.device, dtype)


def values_of(result: Any) -> list[torch.Tensor]:
    """Return copies of the tensors in a result. A number is one, too: `.item()` may be what a remedy removes."""
    leaves = [torch.tensor(v) if isinstance(v, (int, float, complex)) else v for v in pytree.tree_leaves(result)]
    return [t.detach().clone() for t in leaves if isinstance(t, torch.Tensor)]
