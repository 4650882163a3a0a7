"""A drawn program, compiled on a simulated GPU and checked there.

It must have no race, read no memory that nothing has written, keep what eager promises to its caller, and have no event
that orders nothing; no pass may leave an operation without its placement. Eager itself is checked in the same way
first: a program that races there would be the generator's fault (`Invalid`).
"""

import warnings
from typing import Any

import torch

import form  # noqa: F401
from stream_programs._program import Kit, Program
from stream_programs._quiet import quiet
from stream_programs.drawn.unwritten import pieces, unwritten
from torch_overlay import config
from torch_overlay.analysis.race_check.checking import CALLER, check
from torch_overlay.analysis.race_check.happens_before import Race
from torch_overlay.analysis.race_check.race_report import describe, Promise, Report
from torch_overlay.analysis.race_check.trace import Boundary, ENGINE, HOST
from torch_overlay.testing import placement_checked, simulated_gpu


class Invalid(AssertionError):
    """The program isn't a fair question."""


class Wrong(AssertionError):
    """`kind` is race, unwritten, fault, lost or redundant."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def report(program: Program, mode: str | None, calls: int = 2, **kwargs: Any) -> Report:
    with (
        simulated_gpu(),
        config.patch(fold_branches_below_us=0.0),
        quiet(),
        placement_checked(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        kit = Kit(program.compiler(mode), sleeps=True)
        fn = program.build(kit)
        inputs = program.make_inputs("cuda", torch.Generator().manual_seed(1))
        return check(fn, *inputs, compile=False, calls=calls, **{"misaligned": False, **kwargs})


def _by_the_way(promise: Promise, trains: bool, breaks: bool) -> bool:
    """Eager's engine joins each stream on which it ran something, if only the backward of a view, and with it what the
    caller happened to have there. And what eager saves a function of, a compiled backward may read itself to compute
    that again: after an event or a synchronisation of the forward nothing is free of it, as nothing is that eager
    saves. Nor is a result free after an event of the function: a copy is the value that it was made from, where that
    is not written to, and others read it. Nor does a view that nobody uses make the engine join its stream if the
    leaf that it shows is read in another frame.
    """
    if breaks and trains and promise.what == "reuse" and promise.because == ENGINE:
        return True
    if promise.what == "overwrite" and promise.who.startswith("event") and promise.value.startswith("output"):
        return True
    read_again = promise.what == "overwrite" and (promise.who == HOST or promise.who.startswith("event"))
    return trains and (promise.value.startswith("the caller's work") or read_again)


def _left_to_host(race: Race) -> bool:
    return race.kind == "host" and race.second.launch.name == CALLER


def _parts(found: Report) -> set[tuple[str, str]]:
    """(call, value) of what has a part of its memory only. Whoever overwrites it needn't care for kernels that read the
    other parts, nor who waits for an event from before the call for those that write them, but of a kernel that isn't
    Inductor's own it is known which tensors it uses, and not which of their elements.
    """
    boundaries = [o for trace in found.traces for o in trace.operations if isinstance(o, Boundary)]
    return {
        (boundary.name, name)
        for boundary in boundaries
        for name, view in boundary.views
        if sum(end - start for start, end in pieces(view)) < view.memory.size
    }


def _is_eagers(race: Race, found: Report) -> bool:
    """A value that one stream made and the engine drops after another one's read of it is handed on too early in
    eager, too: the user should have told the allocator (`record_stream`). Generated code knows what its own forward
    kept for it, but not whose memory a value is that came from an earlier frame.
    """
    return race.kind == "reuse" and any(
        other.kind == "reuse"
        and other.first.launch.stream == race.first.launch.stream
        and other.second.launch.stream == race.second.launch.stream
        and other.first.view.memory.size == race.first.view.memory.size
        for other in found.in_eager
    )


def _is_left_unsafe(race: Race, found: Report) -> bool:
    """A value of an earlier frame that a stream still reads when it is dropped is handed on too early in eager, too,
    which leaves the memory of that pool unsafe. A frame doesn't know whose memory a value is that an earlier one made.
    """
    pool = race.first.view.memory.stream
    rows = [calls.get(f"free memory of {pool}") for calls in (found.context.promises or {}).values()]
    return race.kind == "reuse" and any(row is not None and pool not in row.readable for row in rows)


def _moved(found: Report) -> set[str]:
    """Calls in which eager frees memory of one stream that others still use, and compiled code has that memory of
    another stream. An earlier frame chose the stream, and can't know those of a later one: neither is safe.
    """
    pool = "free memory of "
    return {
        call
        for call, rows in (found.context.promises or {}).items()
        for name, eager in rows.items()
        if name.startswith(pool) and name.removeprefix(pool) not in eager.readable
    }


def _left_to_the_caller(found: Report) -> list[str]:
    """Results that the caller's stream may not read yet, as eager hands them out."""
    current = found.context.current
    return [
        f"{call}, {name}: the caller's stream has to wait for it"
        for call, rows in (found.context.promises or {}).items()
        for name, eager in rows.items()
        if name.startswith("output") and current not in eager.readable
    ]


def findings(
    found: Report, host_waits: bool = False, trains: bool = False, breaks: bool = False
) -> list[tuple[str, str]]:
    """(kind, text) of all that is wrong.

    With `host_waits`, promises to the host count: it is told to wait. A copy between host and device makes it wait,
    too, but where compiled code makes the copy is its own affair; the caller waits again before it reads host memory.
    """
    races = [
        ("race", describe(r))
        for r in found.races
        if (host_waits or not _left_to_host(r)) and not _is_eagers(r, found)
        if not (breaks and _is_left_unsafe(r, found))
    ]
    parts = _parts(found)
    moved = _moved(found) if breaks else set()
    lost = [
        ("lost", str(p))
        for p in found.lost
        if (host_waits or p.who != HOST) and not _by_the_way(p, trains, breaks)
        if p.what != "reuse" or p.call not in moved
        if (p.call, p.value) not in parts or not (p.what == "overwrite" or p.who.startswith("event"))
    ]
    blank = [("unwritten", text) for trace in found.traces for text in unwritten(trace.operations)]
    faults = [("fault", text) for text in found.faults]
    return [*races, *blank, *faults, *lost, *(("redundant", f"{r.what}: {r.why} ({r.site})") for r in found.redundant)]


def check_compiled(
    program: Program,
    mode: str | None = None,
    *,
    host_waits: bool = False,
    trains: bool = False,
    minimal: bool = True,
    misaligned: bool = False,
    joined: bool = False,
) -> Report:
    """Raises `Wrong` with the report if something is wrong. `joined` says that the caller reads results at once."""
    found = report(program, mode, misaligned=misaligned)
    unread = _left_to_the_caller(found) if joined else []
    if reasons := [*found.notes, *map(describe, found.eager_races), *unread]:
        raise Invalid("\n".join(reasons))
    wrong = [
        f for f in findings(found, host_waits, trains, breaks=not program.fullgraph) if minimal or f[0] != "redundant"
    ]
    if wrong:
        raise Wrong(wrong[0][0], "\n".join(text for _, text in wrong))
    return found
