"""Runs a function for some steps, and says what of it is outside of CUDA graphs, why, and what that costs.

The first half of the steps warms up: graphs are made at the second call of a size. The second half is counted, timed,
profiled, and run once more while torch notes where the host waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import Any, TYPE_CHECKING

import torch
import torch.utils._pytree as pytree

from torch_overlay._inductor.relaunch import coverage as counts
from torch_overlay._inductor.relaunch.causes import CAUSES
from torch_overlay.analysis.doctor import remedies, timeline, waits
from torch_overlay.analysis.doctor.diagnosis import Diagnosis, Finding, Trial
from torch_overlay.analysis.doctor.timeline import Timeline
from torch_overlay.testing import observe


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch_overlay._inductor.relaunch.coverage import Coverage

TIMED = 40  # steps, of which the fastest counts: others may use the host meanwhile
LONG = 50.0  # ms; guards don't count in a step that takes longer


def diagnose(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    steps: int = 8,
    target: str = "",
    remedy: Callable[..., Any] | None = None,
    tries: bool = True,
    without_graphs: bool = True,
    simulated: bool = False,
) -> Diagnosis:
    """Run `fn(*args)`, compiled with CUDA graphs if it isn't compiled, and its backward if that is asked for.

    `steps` (at least 4) are run; half of them warm up. Switches that may help are tried in this process, each from a
    fresh compilation, with the results compared; so is `remedy`, the function as the caller has changed it; and it is
    timed without graphs. Raises ValueError for fewer steps, and what the function raises."""
    if steps < 4:
        raise ValueError(f"steps must be at least 4, got {steps}: graphs are made at the second call")
    target = target or name_of(fn)
    first = _measure(fn, args, backward, steps, simulated)
    findings = by_cost(first.findings)
    trials: list[Trial] = []
    without = None
    if without_graphs and not simulated and first.coverage.functions:
        from torch_overlay import config

        with config.patch(cudagraphs="off"):
            without = _measure(fn, args, backward, steps, simulated, detail=False).ms
    if tries:
        for code, options in remedies.switches(findings):
            with patched(options):
                trials.append(_try(fn, args, backward, steps, simulated, first, code, remedies.as_text(options)))
    if remedy is not None:
        code = findings[0].code if findings else ""
        trials.append(_try(remedy, args, backward, steps, simulated, first, code, name_of(remedy)))
    found = diagnosis(target, simulated, first.coverage, findings, first.ms, without, trials)
    found = dataclasses.replace(found, results=tuple(first.results), timeline=first.timeline, guards_us=first.guards_us)
    return logged(found) if tries else found


def diagnosis(
    target: str,
    simulated: bool,
    coverage: Coverage,
    findings: Iterable[Finding],
    ms: float | None = None,
    ms_without_graphs: float | None = None,
    trials: Iterable[Trial] = (),
) -> Diagnosis:
    """Return what was found on the current device, the most costly first."""
    return Diagnosis(
        target,
        f"{torch.cuda.get_device_name()}{' (simulated)' if simulated else ''}",
        simulated,
        coverage.share,
        ms,
        ms_without_graphs,
        tuple(by_cost(findings)),
        tuple(trials),
        json.loads(coverage.to_json()),
        str(coverage).partition("\n\n[")[0] if coverage.functions else "",
    )


def logged(found: Diagnosis) -> Diagnosis:
    """Add a diagnosis to torch's structured log, TORCH_TRACE, as an artifact; tlparse shows it. Return it."""
    about = {"name": "torch_overlay_doctor", "encoding": "json"}
    torch._logging.trace_structured("artifact", metadata_fn=lambda: about, payload_fn=found.to_json)
    return found


def name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def by_cost(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.cost, reverse=True)


class _Measured:
    def __init__(self) -> None:
        self.coverage: Coverage = counts.Coverage(())
        self.findings: list[Finding] = []
        self.ms: float | None = None
        self.guards_us: float | None = None
        self.results: list[torch.Tensor] = []
        self.timeline = Timeline()


def _measure(
    fn: Callable[..., Any], args: Sequence[Any], backward: bool, steps: int, simulated: bool, detail: bool = True
) -> _Measured:
    """Compile anew, warm up, and count and time the steps after that."""
    torch._dynamo.reset()
    found = _Measured()
    is_compiled = hasattr(fn, "_torchdynamo_orig_callable") or isinstance(fn, torch._dynamo.OptimizedModule)
    run = fn if is_compiled else torch.compile(fn, mode="reduce-overhead")

    def step() -> Any:
        result = run(*args)
        if backward:
            leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            losses = [leaf.float().sum() for leaf in leaves if leaf.requires_grad]
            if not losses:
                raise ValueError("backward: no output requires a gradient")
            sum(losses).backward()  # type: ignore[union-attr]
        return result

    torch.manual_seed(0)
    with observe() as seen:
        if simulated:
            step()
            found.coverage = counts.coverage()
        else:
            result: Any = None
            for _ in range(steps // 2):
                step()
            before = counts.coverage()
            for _ in range(steps - steps // 2):
                result = step()
            torch.cuda.synchronize()
            found.coverage = counts.coverage().since(before)
            found.results = [t.detach().clone() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            found.ms = _least_ms(step)
            found.guards_us = guards_us(step, found.ms) if detail else None
    found.timeline = timeline.take(step) if detail and not simulated else Timeline()
    times = found.timeline.operators or {}
    counted = max(steps - steps // 2, 1) if not simulated else 1
    found.findings = findings_of(found.coverage, seen, times, counted)
    if detail and not simulated:
        with waits.noted() as lines:
            step()
        torch.cuda.synchronize()
        known, cause = {finding.line.partition(": ")[0] for finding in found.findings}, CAUSES["host-wait"]
        for line, count in lines.items():
            if line not in known:
                message = f"{cause.title}, {count} times a step"
                found.findings.append(Finding("host-wait", "", line, message, cause.remedy))
    return found


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


def findings_of(coverage: Coverage, seen: Any, times: dict[str, tuple[float, float]], steps: int) -> list[Finding]:
    """Return a finding for each cause outside of graphs and each graph break. `times`: (host us, device us) of a step
    by operator; launches are divided by `steps`."""
    found = []
    for each in (*coverage.refused, *(each for function in coverage.functions for each in function.outside)):
        host, device = times.get(each.operator.rpartition(".")[0], (None, None))
        found.append(
            Finding(each.code, each.operator, each.line, each.message, each.remedy, each.kernels / steps, host, device)
        )
    for each in dict.fromkeys(seen.graph_breaks):
        remedy = "; ".join(each.hints) or CAUSES["graph-break"].remedy
        found.append(Finding("graph-break", "", f"{each.file}:{each.line}", each.reason, remedy))
    return found


def _try(
    fn: Callable[..., Any],
    args: Sequence[Any],
    backward: bool,
    steps: int,
    simulated: bool,
    first: _Measured,
    code: str,
    change: str,
) -> Trial:
    try:
        after = _measure(fn, args, backward, steps, simulated, detail=False)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        return Trial(code, change, first.coverage.share, 0.0, first.ms, None, False, f"{type(error).__name__}: {text}")
    equal = are_equal(first.results, after.results)
    return Trial(code, change, first.coverage.share, after.coverage.share, first.ms, after.ms, equal)


def are_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """True if results are equal but for the order in which they were computed."""
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-2, atol=1e-3, equal_nan=True)
        for a, b in zip(first, second)
    )


@contextlib.contextmanager
def patched(options: dict[str, object]) -> Iterator[None]:
    """Set options, given by their full names, for the time inside."""
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            module, option = remedies.split(name)
            stack.enter_context(module.patch({option: value}))
        yield
