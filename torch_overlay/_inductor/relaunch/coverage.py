"""Counts how much of the compiled code runs in CUDA graphs, and lists what does not, with its cause.

Nothing is counted while a graph is launched: the C module counts its launches, and a `Runner` counts the calls that it
runs as compiled. All else is known when the code is compiled or captured.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.causes import Cause, refused as all_refused
from torch_overlay._inductor.relaunch.runners import listen, on_reset
from torch_overlay.table import aligned


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.notes import Partitions
    from torch_overlay._inductor.relaunch.rewrites.resident import Residents
    from torch_overlay._inductor.relaunch.runner import Runner

log = logging.getLogger(__name__)

FEWER_FIRST_CALLS = "pass the number as a tensor, or pad to a few sizes"  # the remedy where there are many

live: weakref.WeakSet[CompiledCode] = weakref.WeakSet()
_made = 0
_forgotten = 0  # refusals before the last reset


class CompiledCode:
    """Compiled code that asked for graphs. Its runners hold it; where there are none, the function that stands for it
    does. `rewrites`: kind and the user's line of each."""

    def __init__(
        self,
        code: CodeFacts,
        partitions: Partitions,
        rewrites: Sequence[tuple[str, str]] = (),
        residents: Residents | None = None,
    ) -> None:
        global _made
        _made += 1
        self.code, self.partitions, self.number = code, partitions, _made
        self.rewrites, self.residents = tuple(rewrites), residents
        self.runners: list[tuple[int, weakref.ref[Runner]]] = []  # with the number of the partition
        self.without: Cause | None = None  # why there is no graph at all
        self.calls = 0  # of code without a graph
        live.add(self)
        listen()

    def add(self, runner: Runner, number: int) -> None:
        runner.compiled = self
        self.runners.append((number, weakref.ref(runner)))

    def without_graph(self, model: Callable[[list[Any]], Any], why: Cause) -> Callable[[list[Any]], Any]:
        """Return the function that runs code without a graph, and counts its calls."""
        self.without = why

        def run(inputs: list[Any]) -> Any:
            self.calls += 1
            return model(inputs)

        return run


@on_reset
def forget() -> None:
    """Drop the counts of code that `torch._dynamo.reset()` has dropped."""
    global _forgotten
    live.clear()
    _forgotten = len(all_refused())


@dataclass(frozen=True)
class Outside(Cause):
    """Work outside of graphs with one cause."""

    calls: int
    kernels: int  # launches: kernels of generated code times calls

    @property
    def cause(self) -> tuple[str, str, str, str]:
        """What is the same for work that is counted together."""
        return self.code, self.operator, self.line, self.message


@dataclass(frozen=True)
class RegionCoverage:
    """A region with a graph, or one that might get one. Counts are totals over all calls; `kernels` and `launches` are
    those of one call: kernels in generated code, and launches by the host once there is a graph. `nodes`: of all its
    graphs; `scratch_mib`: what a launch allocates and frees; `sizes`: how it runs at sizes without a graph, if it
    had several; `graph_seconds`: what its captures took the host, and `saved_seconds`: what launches have saved it
    (`governor`)."""

    name: str
    line: str
    calls: int
    graph_calls: int
    kernels: int
    launches: int
    graphs: int
    nodes: int
    scratch_mib: float
    sizes: str = ""
    graph_seconds: float = 0.0
    saved_seconds: float = 0.0


@dataclass(frozen=True)
class Function:
    """Code that was compiled as one graph by Dynamo: a forward, a backward, or an inference graph. `rewrites`: kind and
    the user's line of each (`rewrites.graph`); `copies`: how often an input that is kept on the device was copied."""

    name: str
    line: str
    calls: int
    regions: tuple[RegionCoverage, ...]
    outside: tuple[Outside, ...]
    rewrites: tuple[tuple[str, str], ...] = ()
    copies: int = 0

    @property
    def kernels_in_graphs(self) -> int:
        return sum(region.kernels * region.graph_calls for region in self.regions)

    @property
    def kernels_outside(self) -> int:
        return sum(each.kernels for each in self.outside)

    @property
    def host_launches(self) -> int:
        """Launches by the host: of graphs, and of kernels outside."""
        return sum(region.launches * region.graph_calls for region in self.regions) + self.kernels_outside


@dataclass(frozen=True)
class Coverage:
    """What runs in CUDA graphs and what does not, since the process began or `torch._dynamo.reset()`. Printing it gives
    a table. `eager` is what the doctor saw beside compiled code, where an operator is one launch; None: nobody watched,
    and all counts are of compiled code."""

    functions: tuple[Function, ...]
    refused: tuple[Outside, ...] = ()  # code that was refused before it could be counted
    graph_breaks: tuple[tuple[str, int], ...] = ()  # reason, and how often Dynamo met it
    eager: tuple[Outside, ...] | None = None

    @property
    def kernels_in_graphs(self) -> int:
        return sum(function.kernels_in_graphs for function in self.functions)

    @property
    def kernels_outside(self) -> int:
        return sum(function.kernels_outside for function in self.functions) + self.kernels_in_eager

    @property
    def kernels_in_eager(self) -> int:
        return sum(each.kernels for each in self.eager or ())

    @property
    def host_launches(self) -> int:
        return sum(function.host_launches for function in self.functions) + self.kernels_in_eager

    @property
    def outside(self) -> list[Outside]:
        return [*(each for function in self.functions for each in function.outside), *(self.eager or ())]

    @property
    def share(self) -> float:
        """Kernels launched by graphs, of all kernels: from 0 to 1; 1 if nothing was launched."""
        total = self.kernels_in_graphs + self.kernels_outside
        return self.kernels_in_graphs / total if total else 1.0

    def since(self, before: Coverage) -> Coverage:
        """Return the counts since `before`, for the functions that were called since."""
        known = {function.name: function for function in before.functions}
        functions = tuple(_difference(f, known.get(f.name)) for f in self.functions)
        breaks = Counter(dict(self.graph_breaks)) - Counter(dict(before.graph_breaks))
        return Coverage(tuple(f for f in functions if f.calls), self.refused, tuple(breaks.most_common()))

    def to_json(self) -> str:
        totals = {
            "kernels_in_graphs": self.kernels_in_graphs,
            "kernels_outside": self.kernels_outside,
            "host_launches": self.host_launches,
            "share": self.share,
        }
        return json.dumps({**totals, **dataclasses.asdict(self)})

    def summary(self) -> str:
        """Return one line."""
        if not self.functions and not self.refused:
            return "no compiled code asked for CUDA graphs"
        of = " of compiled code" if self.eager is None else ""
        eager = f", {self.kernels_in_eager} are in eager code" if self.eager else ""
        return (
            f"{100 * self.share:.1f} % of {self.kernels_in_graphs + self.kernels_outside} kernel launches{of} are in "
            f"CUDA graphs{eager}, {self.host_launches} launches by the host; "
            f"causes of launches outside: {len(self.outside)}"
        )

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("function", "region", "calls", "by graph", "kernels", "launches", "graphs", "nodes", "scratch MiB")
        ]
        for function in self.functions:
            for i, region in enumerate(function.regions):
                counts = (region.calls, region.graph_calls, region.kernels, region.launches, region.graphs)
                where = (function.name if i == 0 else "", region.line or region.name)
                rows.append((*where, *map(str, (*counts, region.nodes)), f"{region.scratch_mib:.1f}"))
            if not function.regions:
                rows.append((function.name, "no region has a graph", str(function.calls), "0", *[""] * 5))
        lines = [self.summary()]
        if len(rows) > 1:
            lines += ["", *aligned(rows)]
        for each in sorted(self.outside, key=lambda each: -each.kernels):
            lines += ["", f"[{each.code}] {each.message} (calls: {each.calls}, launches: {each.kernels})"]
            lines += [f"    at {each.line}"] * bool(each.line) + [f"    {each.remedy}"] * bool(each.remedy)
        for function in self.functions:
            lines += ["", *_rewritten(function)] if function.rewrites else []
            for region in function.regions:
                if region.sizes:
                    took, saved = f"{region.graph_seconds:.2f} s", f"{region.saved_seconds:.2f} s"
                    account = f"    captures took {took} of the host, and launches have saved {saved}"
                    lines += ["", f"[sizes] {region.line or region.name}", f"    {region.sizes}", account]
        for each in self.refused:
            lines += ["", f"[{each.code}] {each.message}"] + [f"    {each.remedy}"] * bool(each.remedy)
        for reason, count in self.graph_breaks:
            lines += ["", f"[graph-break] {count} x {reason}"]
        return "\n".join(lines)


def _rewritten(function: Function) -> list[str]:
    copied = f", copied to the device {function.copies} times in {function.calls} calls" if function.copies else ""
    lines = [f"[rewritten] {function.name}{copied}"]
    return lines + [f"    {kind} at {line}" if line else f"    {kind}" for kind, line in function.rewrites]


TOTALS = "calls", "graph_calls", "graph_seconds", "saved_seconds"  # of a region


def _difference(after: Function, before: Function | None) -> Function:
    if before is None:
        return after
    regions = []
    for region, old in zip(after.regions, before.regions):
        counts = {name: getattr(region, name) - getattr(old, name) for name in TOTALS}
        regions.append(dataclasses.replace(region, **counts))
    known = {each.cause: each for each in before.outside}
    outside = []
    for each in after.outside:
        old_one = known.get(each.cause)
        if old_one is not None:
            counts = {"calls": each.calls - old_one.calls, "kernels": each.kernels - old_one.kernels}
            each = dataclasses.replace(each, **counts)
        outside += [each] * bool(each.calls or each.kernels)
    counts = {"calls": after.calls - before.calls, "copies": after.copies - before.copies}
    return dataclasses.replace(after, **counts, regions=tuple(regions), outside=tuple(outside))


def coverage() -> Coverage:
    """Return what runs in CUDA graphs and what does not, since the process began or `torch._dynamo.reset()`."""
    from torch._dynamo.utils import counters

    functions = [_function(compiled) for compiled in sorted(live, key=lambda compiled: compiled.number)]
    breaks = Counter({_one_line(reason): count for reason, count in counters["graph_break"].items()})
    refused = [
        _outside(why, why.region.source, 0, 0)
        for why in all_refused()[_forgotten:]
        if why.code == "cpp-wrapper"  # Inductor turns graphs off before it compiles
    ]
    return Coverage(tuple(functions), tuple(refused), tuple(breaks.most_common()))


def _log_at_exit() -> None:
    if log.isEnabledFor(logging.INFO) and (found := coverage()).functions:
        log.info("%s", found)


atexit.register(_log_at_exit)


def _one_line(text: Any) -> str:
    return " ".join(str(text).split("\n\n")[0].split())


def _function(compiled: CompiledCode) -> Function:
    runners = [(number, runner) for number, ref in compiled.runners if (runner := ref()) is not None]
    kernels = [count for count, *_ in compiled.partitions.graphs]
    regions, outside, calls = [], [], compiled.calls
    for number, runner in runners:
        region = _region(runner, kernels[number] if number < len(kernels) else 0)
        regions.append(region)
        calls = max(calls, region.calls)
        outside += _without_graph(runner, region.kernels)
    if compiled.without is not None and compiled.without.code != "split":  # its parts are listed below
        outside.append(_outside(compiled.without, compiled.code.source, calls, sum(kernels)))
    outside += [_outside(row, compiled.code.source, calls, row.kernels) for row in compiled.partitions.split_off]
    name = f"{compiled.code.name} #{compiled.number}"
    copies = compiled.residents.copies if compiled.residents is not None else 0
    causes = tuple(_merged(outside))
    return Function(name, compiled.code.source, calls, tuple(regions), causes, compiled.rewrites, copies)


def _merged(outside: Iterable[Outside]) -> list[Outside]:
    """Add up the launches of what has the same cause at the same place; its calls are those of the part with most."""
    found: dict[tuple[str, str, str, str], Outside] = {}
    for each in outside:
        known = found.get(each.cause)
        if known is not None:
            calls, kernels = max(each.calls, known.calls), each.kernels + known.kernels
            each = dataclasses.replace(each, calls=calls, kernels=kernels)
        found[each.cause] = each
    return [each for each in found.values() if each.calls]


def _region(runner: Runner, kernels: int) -> RegionCoverage:
    graphs, by_graph = runner.graphs(), runner.launched()
    return RegionCoverage(
        name=runner.code.name,
        line=runner.code.source,
        calls=by_graph + sum(runner.outside.values()),
        graph_calls=by_graph,
        kernels=kernels,
        launches=max([graph.launches for graph in graphs], default=0),
        graphs=len(graphs),
        nodes=sum(graph.nodes for graph in graphs),
        scratch_mib=max([graph.scratch for graph in graphs], default=0) / (1 << 20),
        sizes=runner.describe_sizes(),
        graph_seconds=runner.governor.spent,
        saved_seconds=runner.governor.saved(by_graph),
    )


def _outside(why: Cause, source: str, calls: int, kernels: int) -> Outside:
    """Return the work that a cause keeps outside. `source`: its line, if the cause has none; `kernels`: of one call."""
    return Outside(why.code, why.operator, why.line or source, why.message, why.remedy, calls, kernels * calls)


def _without_graph(runner: Runner, kernels: int) -> list[Outside]:
    found = []
    for code, count in runner.outside.items():
        why: Cause = runner.refusals.get(code) or Cause.of(code)
        if code == "warm-up" and count > 1:
            kept = [f"; the number at input {k} is no parameter: {what}" for k, what in runner.keys.kept.items()]
            why = dataclasses.replace(why, message="".join([why.message, *kept]), remedy=FEWER_FIRST_CALLS)
        found.append(_outside(why, runner.code.source, count, kernels))
    return found
