"""Compiles the programs in examples/, and shows the result; on a GPU, runs and times them as well."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.utils._pytree as pytree

import torch_overlay
from torch_overlay._cli import program
from torch_overlay._cli.commands import Outcome, UsageError
from torch_overlay._cli.screen import Screen
from torch_overlay._inductor.streams.plan import HOST
from torch_overlay.analysis.timelines.model import device_work, overlap


if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.streams.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = ("prefetch_loop", "moe_experts", "transformer_side_branch")
ROUNDS = ("overlay", "stock", "stock", "overlay")


@dataclasses.dataclass(frozen=True)
class Events:
    records: int
    waits: int

    def __str__(self) -> str:
        return f"{_count(self.records, 'record')}, {_count(self.waits, 'wait')}"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Results of compiling one program."""

    name: str
    graph_breaks: tuple[str, ...]
    plans: tuple[Plan, ...] = dataclasses.field(repr=False)
    written: Events
    generated: Events
    picture: Path | None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def load(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and the arguments that an example makes."""
    return program.load(str(EXAMPLES / f"{name}.py"), "")


def events_written(device_log: Sequence[str]) -> Events:
    """Count the events that a program records and waits for, from the log of one eager call."""
    return Events(
        sum(line.startswith("record event") for line in device_log),
        sum(" waits for event " in line for line in device_log),
    )


def events_generated(plans: Sequence[Plan]) -> Events:
    """Count the events of the compiled program. An event of the user's that the caller can see is recorded as well."""
    own = sum(op.name == "record_event" for plan in plans for op in plan.ops)
    return Events(own + sum(len(plan.events) for plan in plans), sum(plan.num_waits for plan in plans))


def placement(plans: Sequence[Plan]) -> str:
    """Say how many operations run on each stream; side streams with the same number share a line."""
    operations = collections.Counter(op.stream for plan in plans for op in plan.ops if op.stream is not None)
    lines = [f"{operations[stream]} on the {stream_name(stream)}" for stream in sorted(operations) if stream < 1]
    side_streams: dict[int, list[int]] = {}
    for stream in sorted(stream for stream in operations if stream > 0):
        side_streams.setdefault(operations[stream], []).append(stream)
    for number, streams in side_streams.items():
        if len(streams) == 1:
            lines.append(f"{number} on {stream_name(streams[0])}")
        elif streams == list(range(streams[0], streams[-1] + 1)):
            lines.append(f"{number} on each of streams {streams[0]} to {streams[-1]}")
        else:
            lines.append(f"{number} on each of streams {', '.join(map(str, streams))}")
    return "\n".join(lines)


def stream_name(stream: int) -> str:
    """Return the name of a stream as the planner numbers it: -1 is the host, 0 the caller's stream."""
    return {HOST: "host", 0: "current stream"}.get(stream, f"stream {stream}")


def compile_program(name: str, out: Path) -> Compilation:
    """Compile one example for the simulated GPU, and write its plan as text and a call of it as a picture."""
    from torch_overlay.analysis import timeline
    from torch_overlay.testing import observe, simulated_gpu

    with simulated_gpu() as gpu, observe() as compiled:
        function, args = load(name)
        start = len(gpu.device_log)
        function(*args)
        written = events_written(gpu.device_log[start:])
        drawn = timeline(function, *args, title=name)
    picture = None
    if compiled.plans:
        picture = drawn.save(out / f"{name}.svg")
        drawn.save(picture.with_suffix(".json"))
        picture.with_suffix(".txt").write_text("\n\n".join(plan.table() for plan in compiled.plans) + "\n")
    return Compilation(
        name,
        tuple(map(str, compiled.graph_breaks)),
        tuple(compiled.plans),
        written,
        events_generated(compiled.plans),
        picture,
    )


def show_compilations(screen: Screen, compilations: Sequence[Compilation]) -> None:
    rows = [
        (
            c.name,
            str(len(c.graph_breaks)),
            placement(c.plans),
            str(c.written),
            str(c.generated),
            os.path.relpath(c.picture) if c.picture else "no stream in it",
        )
        for c in compilations
    ]
    columns = ("program", "graph breaks", "operations", "events you wrote", "events generated", "picture of a call")
    screen.table("Compiled", columns, rows)
    for c in compilations:
        for graph_break in c.graph_breaks:
            screen.line(f"{c.name}: {graph_break}")


# ---- on a GPU


def measure_apart(form: str, names: Sequence[str]) -> dict[str, Any]:
    """Run the programs in a process of their own, with the overlay or with stock PyTorch."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    off = "1" if form == "stock" else "0"
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_OVERLAY_DISABLE": off}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "torch_overlay._cli.demo", str(result), *names]
        process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    for name in names:
        found.setdefault(name, {"error": f"the process ended with status {process.returncode}: {last}"})
    return found


def merge(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the rounds of one program and form: the medians of all times, the worst difference, the first error."""
    errors = [r["error"] for r in rounds if r.get("error")]
    if errors:
        return {"error": errors[0]}
    return {
        "eager": statistics.median(t for r in rounds for t in r["eager"]),
        "compiled": statistics.median(t for r in rounds for t in r["compiled"]),
        "difference": max(r["difference"] for r in rounds),
        "equal": all(r["equal"] for r in rounds),
        "overlap": rounds[-1]["overlap"],
    }


def show_measurements(screen: Screen, results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> bool:
    """Print the table; return True if every program ran with the overlay and was equal to ordered eager."""
    rows, notes, good = [], [], True
    for name, forms in results.items():
        overlay, stock = forms["overlay"], forms["stock"]
        for form, result in forms.items():
            if "error" in result:
                notes.append(f"{name}, {form}: {result['error']}")
        ours, theirs = overlay.get("compiled"), stock.get("compiled")
        good = good and overlay.get("equal", False)
        verdict = "did not run"
        if ours:
            verdict = f"{'yes' if overlay['equal'] else 'NO'}, {overlay['difference']:.1g}"
        if theirs and not stock["equal"]:
            notes.append(f"{name}, stock: differs from ordered eager by {stock['difference']:.2g} of the largest value")
        rows.append(
            (
                name,
                verdict,
                overlay.get("overlap", ""),
                _microseconds(overlay.get("eager")),
                "fails, see below" if theirs is None else _microseconds(theirs),
                _microseconds(ours),
                f"{theirs / ours:.2f} ×" if ours and theirs else "",
            )
        )
    columns = (
        "program",
        "equal to ordered eager,\nlargest difference",
        "time with two streams busy",
        "eager",
        "stock compile",
        "with the overlay",
        "stock / overlay",
    )
    screen.table("Run: medians of a call, in microseconds", columns, rows)
    for note in notes:
        screen.line(note)
    return good


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def run_on_gpu(screen: Screen, names: Sequence[str]) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {"overlay": [], "stock": []}
    for number, form in enumerate(ROUNDS, 1):
        screen.line(f"running: {form}, round {number} of {len(ROUNDS)}")
        rounds[form].append(measure_apart(form, names))
    return {n: {form: merge([r[n] for r in found]) for form, found in rounds.items()} for n in names}


def run(options: argparse.Namespace) -> Outcome:
    """Run the demo; the status is 0 if no program had a graph break and, on a GPU, every one was equal to ordered
    eager.
    """
    names, out = options.programs or PROGRAMS, Path(options.folder or ROOT / "build" / "demo")
    for name in names:
        if not (EXAMPLES / f"{name}.py").is_file():
            raise UsageError(f"{EXAMPLES / name}.py does not exist: the demo runs the examples of a checkout")
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UsageError(f"--out {out}: no picture can be written there: {error.strerror}") from error
    screen = Screen()
    gpu = torch.cuda.is_available() and not options.compile_only
    screen.line(f"torch_overlay {torch_overlay.__version__} on torch {torch.__version__}")
    if not gpu:
        why = "as asked" if options.compile_only else "no GPU here"
        screen.line(f"Compile-only ({why}): the programs are compiled for a simulated GPU, and not run.")
    compilations = []
    for number, name in enumerate(names, 1):
        screen.line(f"compiling {name}, {number} of {len(names)}")
        try:
            compilations.append(compile_program(name, out))
        except ModuleNotFoundError as error:
            screen.line(f"{name} needs the package {error.name}: pip install -e '{ROOT}[demo]'")
    show_compilations(screen, compilations)
    complete = len(compilations) == len(names) and not any(c.graph_breaks for c in compilations)
    measured: dict[str, Any] = {}
    if gpu and compilations:
        measured = run_on_gpu(screen, [c.name for c in compilations])
        complete = show_measurements(screen, measured) and complete
    return Outcome(int(not complete), {"compiled": compilations, "measured": measured}, lambda: None)


# ---- in a process of its own, with one form of PyTorch: python -m torch_overlay._cli.demo RESULT.json PROGRAM ...

CHECKED_CALLS, BATCHES, CALLS_IN_BATCH = 20, 15, 20
TOLERANCE = 2e-2  # of the largest value: two bfloat16 matrix products whose sums are formed in another order
DELAY = 2_000_000  # clock cycles, about a millisecond


@contextlib.contextmanager
def ordered() -> Iterator[None]:
    """Run eager code in program order: every operation on the current stream."""
    with mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()):
        yield


def tensors(outputs: Any) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    return [leaf.float().clone() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Return the largest difference, as a fraction of its tensor's largest value; infinite if it is not a finite
    number.
    """
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        gap = (a - b).abs().max() / a.abs().max().clamp_min(1e-12)
        worst = max(worst, gap.item() if gap.isfinite() else float("inf"))
    return worst


def time_calls(function: Callable[..., Any], args: tuple[Any, ...]) -> list[float]:
    """Return microseconds per call: wall time of calls in a row, waiting for the device at the end of each batch."""
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS_IN_BATCH):
            function(*args)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / CALLS_IN_BATCH)
    return times


def profile(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    from torch.profiler import profile, ProfilerActivity

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            function(*args)
        torch.cuda.synchronize()
    return str(overlap(device_work(seen)))


def measure(name: str) -> dict[str, Any]:
    function, args = load(name)
    with ordered():
        expected = tensors(function(*args))
    compiled = torch.compile(function, fullgraph=True)
    worst = 0.0
    for call in range(CHECKED_CALLS):
        if call % 2:
            torch.cuda._sleep(DELAY)
        worst = max(worst, difference(expected, tensors(compiled(*args))))
    time_calls(function, args)  # warm-up
    return {
        "difference": worst,
        "equal": worst <= TOLERANCE,
        "compiled": time_calls(compiled, args),
        "eager": time_calls(function, args),
        "overlap": profile(compiled, args),
    }


def main(result: Path, names: list[str]) -> None:
    """Measure programs. The file is written anew after every program, so if a program crashes the process, the results
    of the programs before it remain.
    """
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = measure(name)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            found[name] = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        result.write_text(json.dumps(found))
        torch._dynamo.reset()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
