"""Find the source line of each kernel and copy in a profile, by matching it with generated code, without guessing.

A Triton kernel is looked up by its name, if the name is unique. The name of a library's kernel doesn't identify its
line. Within one call of a compiled graph, operators run in the order of the generated statements: if the whole sequence
of names is that of one module, each operator belongs to the statement at its position.

The kernels of a CUDA graph are all launched by one call, without operators around them. But each stream of the graph
runs the statements that the generated code puts on one stream, in order, and Triton kernels have names. If each
stream's kernels match the statements of a different stream of one generated function, the kernels between two Triton
kernels are known, too, if there is one kernel for each operator, or only one operator.

Note [Copies of saved activations]
The tensors that a forward saves on the host lie in one slab, each at its own offset, in the order in which the forward
makes them; the offset identifies the tensor of a copy to the host or back. The plan's name of the tensor, and the
user's line that made it, come from the report that is published when the graphs are split (`offload.log`).

A profile has no offsets, but it has the copies of a direction in the order in which the schedule launches them. If
their sizes are those of the schedule, once or repeatedly, each copy gets the tensor at its position; otherwise none.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay._functorch.offload.runtime import ALIGNMENT
from torch_overlay.analysis.race_check.trace import HOST, Launch
from torch_overlay.analysis.timelines.model import FROM_HOST, TO_HOST
from torch_overlay.testing._text import as_line, innermost_frame


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch_overlay.analysis.race_check.trace import Memory, Operation
    from torch_overlay.analysis.timelines.model import Slice

Event = dict[str, Any]
LAUNCH, RECORD, WAIT = "launch", "record", "wait"
_RUN = re.compile(r"\b(triton_\w+)\.run\(|\bextern_kernels\.(\w+)\(|\btorch\.ops\.(\w+)\.(\w+)\.\w+\(")
_EVENT = re.compile(r"\b(ev\d+)\.(record|wait)\w*\((stream\w*)\)")
_STREAM = re.compile(r"\bstream=(\w+)\)")
_SET_STREAM = re.compile(r"\b(set|restore)_stream\((stream\w*)\)")
_FUNCTION = re.compile(r"\s*def (?:call|partition_\d+)\(")
_CALLERS_STREAM = "stream0"


class Statement(NamedTuple):
    """A statement of generated code. `name`: the profiler's name of a launch, or an event; `stream`: a variable."""

    kind: str
    name: str
    line: str = ""
    stream: str = ""


Run = list[tuple[Statement, list[int]]]
"""Statements in order, each with the indices of the work in the profile that it launched."""


def functions(wrapper: str, lines: Sequence[str]) -> list[list[Statement]]:
    """Return the launches, records and waits of each function of a generated module, in order. `lines` has the user's
    lines of each line of the module.
    """
    found: list[list[Statement]] = []
    current = _CALLERS_STREAM
    for text, line in itertools.zip_longest(wrapper.split("\n"), lines, fillvalue=""):
        if text.lstrip().startswith("#"):
            continue
        elif _FUNCTION.match(text):
            found.append([])
            current = _CALLERS_STREAM
        elif not found:
            continue
        elif match := _RUN.search(text):
            kernel, extern, space, operator = match.groups()
            name = kernel or (f"aten::{extern}" if extern else f"{space}::{operator}")
            explicit = _STREAM.search(text)
            stream = explicit[1].removesuffix("_raw") if kernel and explicit else current
            found[-1].append(Statement(LAUNCH, name, own_line(line), stream))
        elif match := _EVENT.search(text):
            found[-1].append(Statement(match[2], match[1], "", match[3].removesuffix("_raw")))
        elif match := _SET_STREAM.search(text):
            current = match[2]
    return [rows for rows in found if rows]


class Lines:
    """Names and source lines of work on the device."""

    def __init__(self, events: Iterable[Event], work: Sequence[Event], seen: Any) -> None:
        """Match `work` (kernels and copies, in order of time) with statements; `runs` holds positions in `work`."""
        self.runs: list[Run] = []  # one for each matched call
        self.functions: list[list[Statement]] = []
        self.modules: list[list[Statement]] = []
        for region in seen.regions if seen is not None else ():
            if region.wrapper is not None:
                parts = functions(region.wrapper, region.lines)
                self.functions += parts
                self.modules.append([row for part in parts for row in part])
        named: dict[str, set[str]] = {}
        for module in self.modules:
            for row in module:
                if row.kind == LAUNCH:
                    named.setdefault(row.name, set()).add(row.line)
        self.triton = {n: min(found) for n, found in named.items() if n.startswith("triton_") and len(found) == 1}
        self.operators: dict[int, str] = {}  # correlation -> operator
        self.work = work
        self.launched_by: dict[int, list[int]] = {}
        for index, event in enumerate(work):
            self.launched_by.setdefault(argument(event, "correlation"), []).append(index)
        self._match(list(events))
        self.statements = {index: row for run in self.runs for row, done in run for index in done}

    def of(self, index: int) -> tuple[str, str]:
        """Return what the work at `index` computes, and its source line."""
        event = self.work[index]
        row = self.statements.get(index)
        operator = row.name if row is not None else self.operators.get(argument(event, "correlation"), "")
        line, symbol = row.line if row is not None else "", str(event["name"])
        if symbol.startswith("triton_"):
            return readable(symbol), line or self.triton.get(symbol, "")
        if "::" in operator:
            return operator.rpartition("::")[2].strip("_"), line
        return _library(symbol), line

    def _match(self, events: list[Event]) -> None:
        """Match launches with statements, by the call of a compiled graph around them, in order."""
        operators: dict[Any, list[Event]] = {}
        launches: dict[Any, list[Event]] = {}
        graphs: set[int] = set()
        for event in events:
            category = event.get("cat")
            if category in ("cpu_op", "user_annotation") and event.get("ph") == "X":
                operators.setdefault((event["pid"], event["tid"]), []).append(event)
            elif category in ("cuda_runtime", "cuda_driver") and (number := argument(event, "correlation")):
                if "GraphLaunch" in event["name"]:
                    graphs.add(number)
                else:
                    launches.setdefault((event["pid"], event["tid"]), []).append(event)
        known = {row.name for module in self.modules for row in module if row.kind == LAUNCH}
        calls = []
        for thread, mine in launches.items():
            for correlation, call, name, statement in launched(operators.get(thread, []), mine):
                done = self.launched_by.get(correlation, [])
                if call is not None and done and (symbol := str(self.work[done[0]]["name"])) in known:
                    name, statement = symbol, correlation  # a Triton kernel, with or without an operator around it
                self.operators[correlation] = name
                if call is not None and name in known:
                    calls.append((call, name, statement, correlation))
        self._assign(calls)
        for number in sorted(graphs & self.launched_by.keys()):
            if (run := of_graph(self.functions, self.work, self.launched_by[number])) is not None:
                self.runs.append(run)

    def _assign(self, calls: list[tuple[int, str, int, int]]) -> None:
        """Assign launches, rows of (call, name, statement, correlation), to statements; one may have several rows."""
        ran = {name for _, name, *_ in calls}
        graphs: dict[int, dict[tuple[str, int], list[int]]] = {}
        for call, name, statement, correlation in calls:
            graphs.setdefault(call, {}).setdefault((name, statement), []).append(correlation)
        for launches in graphs.values():
            names = [name for name, _ in launches]
            fitting = set()
            for module in self.modules:
                # Operators other than PyTorch's own may launch nothing.
                sure = ("triton_", "aten::")
                rows = tuple(r for r in module if r.kind != LAUNCH or r.name in ran or r.name.startswith(sure))
                if [row.name for row in rows if row.kind == LAUNCH] == names:
                    fitting.add(rows)
            if len(fitting) == 1:
                done = iter(
                    [i for c in correlations for i in self.launched_by.get(c, ())] for correlations in launches.values()
                )
                self.runs.append([(row, next(done) if row.kind == LAUNCH else []) for row in fitting.pop()])


def argument(event: Event, name: str) -> int:
    return int(event.get("args", {}).get(name, 0))


def launched(operators: list[Event], launches: list[Event]) -> Iterator[tuple[int, int | None, str, int]]:
    """Yield for each launch of a thread, in order of time: its correlation; the call of a compiled graph around it; the
    name of the outermost operator inside that call (without a call, of the innermost operator); the operator's index.
    """
    everything = [(float(e["ts"]), -float(e.get("dur", 0)), 0, number, e) for number, e in enumerate(operators)]
    everything += [(float(e["ts"]), 0.0, 1, number, e) for number, e in enumerate(launches)]
    stack: list[tuple[float, int, Event]] = []
    for at, _, is_launch, number, event in sorted(everything, key=lambda row: row[:4]):
        while stack and stack[-1][0] < at:
            stack.pop()
        if not is_launch:
            stack.append((at + float(event.get("dur", 0)), number, event))
            continue
        call = next((i for i in reversed(range(len(stack))) if "CompiledFxGraph" in stack[i][2]["name"]), None)
        inner = [row for row in stack[0 if call is None else call + 1 :] if row[2]["cat"] == "cpu_op"]
        _, which, operator = (inner[-1] if call is None else inner[0]) if inner else (0.0, -1, {"name": ""})
        yield argument(event, "correlation"), None if call is None else stack[call][1], operator["name"], which


_FAMILIES = (("nvjet", "gemm"), ("cutlass", "gemm"), ("gemm", "gemm"), ("flash", "attention"), ("fmha", "attention"))


def _library(symbol: str) -> str:
    """Return a short name for a library's kernel."""
    lowered = symbol.lower()
    for part, family in _FAMILIES:
        if part in lowered:
            return family
    if match := re.search(r"(\w+)_kernel", symbol):
        return match[1]
    return re.split(r"[<(]", symbol.removeprefix("void "))[0].rpartition("::")[2] or symbol


# ---- CUDA graphs


def of_graph(parts: Iterable[Sequence[Statement]], work: Sequence[Event], launched: Sequence[int]) -> Run | None:
    """Return the run of the generated function that a graph was captured from; None if it isn't known."""
    lanes: dict[int, list[int]] = {}
    for index in launched:
        if work[index]["cat"] == "kernel":
            lanes.setdefault(argument(work[index], "stream"), []).append(index)
    found: list[Run] = []
    for part in parts:
        streams: dict[str, list[int]] = {}
        for number, row in enumerate(part):
            if row.kind == LAUNCH:
                streams.setdefault(row.stream, []).append(number)
        if len(streams) == len(lanes) and (run := _aligned(part, streams, lanes, work)) is not None:
            found.append(run)
    return found[0] if len({tuple(row for row, _ in run) for run in found}) == 1 else None


def _aligned(
    part: Sequence[Statement], streams: dict[str, list[int]], lanes: dict[int, list[int]], work: Sequence[Event]
) -> Run | None:
    """Match each lane with a stream of its own; None unless exactly one stream fits each lane."""
    done: list[list[int]] = [[] for _ in part]
    left = dict(streams)
    for lane in lanes.values():
        fitting = {
            stream: found
            for stream, numbers in streams.items()
            if (found := _pairs([part[n].name for n in numbers], [str(work[i]["name"]) for i in lane])) is not None
        }
        if len(fitting) != 1:
            return None
        ((stream, pairs),) = fitting.items()
        if left.pop(stream, None) is None:
            return None
        for row, kernel in pairs:
            done[streams[stream][row]].append(lane[kernel])
    return list(zip(part, done))


def _pairs(statements: Sequence[str], kernels: Sequence[str]) -> list[tuple[int, int]] | None:
    """Pair positions of statements and kernels: Triton kernels by name, others by their place between two of them."""
    triton = [[i for i, name in enumerate(names) if name.startswith("triton_")] for names in (statements, kernels)]
    if [statements[i] for i in triton[0]] != [kernels[i] for i in triton[1]]:
        return None
    found, before = [], (-1, -1)
    for at in [*zip(*triton), (len(statements), len(kernels))]:
        rows, ran = range(before[0] + 1, at[0]), range(before[1] + 1, at[1])
        if len(rows) == len(ran):
            found += zip(rows, ran)
        elif len(rows) == 1 and ran:
            found += [(rows[0], i) for i in ran]
        else:
            return None
        if at[0] < len(statements):
            found.append(at)
        before = at
    return found


_TRITON = re.compile(r"^triton_[a-z]+\d*_(?:fused_)?(.*?)_\d+$")


def readable(symbol: str) -> str:
    """Return what a kernel computes, from its name."""
    if match := _TRITON.match(symbol):
        return match[1].strip("_")
    parts = symbol.split(".")
    return parts[1].strip("_") if len(parts) > 1 and parts[0].isidentifier() else symbol


def own_line(lines: str) -> str:
    """Return the last of a kernel's source lines, which wrote its result; the others are those of its inputs."""
    return re.split(r"; (?=[^\s:;]+:\d+: |[\w.]+ \(\w+\)(?:; |$))", lines)[-1]


def saved_tensors(operations: Sequence[Operation], reports: Sequence[Any]) -> dict[int, tuple[str, str]]:
    """Return name and user's line of the tensor that each copy moves, by the index of the copy's launch."""
    copies: dict[Memory, dict[int, int]] = {}  # slab -> copy -> its offset
    for index, operation in enumerate(operations):
        if isinstance(operation, Launch) and "copy" in operation.name and operation.stream != HOST:
            for access in operation.accesses:
                if access.view.memory.stream == HOST and access.view.span is not None:
                    copies.setdefault(access.view.memory, {})[index] = access.view.span.offset
    slabs = [_slab(report.rows) for report in reports]
    found = {}
    for memory, offsets in copies.items():
        fitting = (rows for rows, end in slabs if rows.keys() >= {*offsets.values()} and end == memory.size)
        if rows := next(fitting, None):
            found |= {index: (rows[offset].name, _line(rows[offset])) for index, offset in offsets.items()}
    return found


def offloaded(slices: Sequence[Slice], seen: Any) -> list[Slice]:
    """Return the slices of a profile, with name and line set for copies of saved activations."""
    found = list(slices)
    reports = getattr(seen, "offloads", None) or ()
    graphs = [r.copies for r in getattr(seen, "regions", ()) if getattr(r, "copies", None) is not None]
    for kind, is_backward in ((TO_HOST, False), (FROM_HOST, True)):
        schedules = [g for g in graphs if g.is_backward == is_backward]
        if len(schedules) != 1 or len(reports) != 1:
            continue
        rows = {row.name: row for row in reports[0].rows}
        order = [rows[name] for name, *_ in sorted(schedules[0].rows, key=lambda row: row[1]) if name in rows]
        copies = sorted((i for i, s in enumerate(slices) if s.kind == kind), key=lambda i: slices[i].start)
        sizes = [row.nbytes for row in order]
        if not order or [slices[i].nbytes for i in copies] != sizes * (len(copies) // len(order)):
            continue
        for position, i in enumerate(copies):
            row = order[position % len(order)]
            found[i] = replace(found[i], name=f"{kind} {row.name}", line=_line(row))
    return found


def _line(row: Any) -> str:
    return as_line(*innermost_frame(row.stack_trace))


def _slab(rows: Sequence[Any]) -> tuple[dict[int, Any], int]:
    """Return the report's rows by their offsets in the slab, and the slab's size."""
    *offsets, end = itertools.accumulate((-(-row.nbytes // ALIGNMENT) * ALIGNMENT for row in rows), initial=0)
    return dict(zip(offsets, rows)), end


__all__ = ["argument", "functions", "LAUNCH", "Lines", "RECORD", "Statement", "WAIT", "offloaded", "saved_tensors"]
