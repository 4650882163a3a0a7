"""Counts what the compiled programs of `test/stream_programs` do in a call, on a simulated GPU.

A row is a program in a mode. It counts the second call, with its backward if it has one, as the race checker's device
sees it:

    kernels, copies      launched on streams;  graph nodes: those that are launched in a graph, under
                         mode="reduce-overhead";  graphs: launched
    events, waits        recorded, and waited for by streams;  host waits: by the host
    record_stream        calls of it
    allocations          of device memory;  allocated, peak: bytes, all together and at one time
    Python calls         that stand in the generated code
"""

from __future__ import annotations

import ast
import warnings
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence

    import records  # pyrefly: ignore[missing-import]

GENERATED = ("call", "partition_")  # how the functions begin that generated code runs at each call
COUNTED = ("kernels", "copies", "graphs", "graph nodes", "events", "waits", "host waits", "record_stream")
COUNTED += ("allocations", "allocated", "peak")


def names() -> list[str]:
    from analysis import corpus

    return [f"{name}, {mode}" for name, mode in corpus.cases()]


def figures(name: str) -> records.Figures:
    """Compile a program and run it twice."""
    from analysis import corpus
    from stream_programs import by_name

    warnings.filterwarnings("ignore")
    program, _, mode = name.partition(", ")
    return of_report(corpus.check_program(by_name(program), None if mode == "default" else mode))


def of_report(report: Any) -> records.Figures:
    """The counts of a race checker's report."""
    found = of_call(report.traces[0].operations) | {"Python calls": python_calls(report.compiled.wrappers)}
    return {"exact": {name: [value] for name, value in found.items()}}


def of_call(operations: Sequence[Any]) -> dict[str, int]:
    """Counts of the last call of a trace, which lies between its last two boundaries."""
    from torch_overlay.analysis.race_check import trace as t
    from torch_overlay.analysis.race_check.checking import CALLER

    kinds = {t.Record: "events", t.Wait: "waits", t.Synchronize: "host waits", t.RecordStream: "record_stream"}
    *_, begin, end = (i for i, o in enumerate(operations) if isinstance(o, t.Boundary))
    found = dict.fromkeys(COUNTED, 0)
    held: dict[int, int] = {}
    in_graph = False
    for i, o in enumerate(operations[:end]):
        is_alloc = isinstance(o, t.Alloc) and o.memory.stream != t.HOST
        if is_alloc:
            held[id(o.memory)] = o.memory.size
        elif isinstance(o, t.Free):
            held.pop(id(o.memory), None)
        if i < begin or CALLER in (getattr(o, "name", ""), getattr(o, "site", "")):
            continue
        found["peak"] = max(found["peak"], sum(held.values()))
        if isinstance(o, t.Launch) and o.name.startswith("a capture's "):
            in_graph = o.name.endswith("begin")
            found["graphs"] += in_graph
        elif isinstance(o, t.Launch) and o.stream != t.HOST:
            found["copies" if "copy_" in o.name else "kernels"] += 1
            found["graph nodes"] += in_graph
        elif is_alloc:
            found["allocations"] += 1
            found["allocated"] += o.memory.size
        elif type(o) in kinds:
            found[kinds[type(o)]] += 1
    return found


def python_calls(wrappers: Sequence[str]) -> int:
    """Calls that stand in the functions of generated modules."""
    functions = [
        node
        for text in wrappers
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith(GENERATED)
    ]
    return sum(isinstance(node, ast.Call) for function in functions for node in ast.walk(function))
