#!/usr/bin/env python3
"""Measures activation offload: training steps with a budget that cuts peak memory by 40 %, against the same without.

    python tools/bench/offload.py [--rows llama,gpt2] [--modes default,reduce-overhead] [--cut 0.4] [--out DIR]

GPT-2 medium and a Llama of 16 layers on one long sequence (`offload_models`), bfloat16, AdamW. Each row and mode has
two processes, without offload and with it, with equal weights and inputs. All compile side by side, and measure one at
a time: a figure is the median of steps between two events of the device.

    off, on          ms a step without offload and with it;  ratio: on / off, at most 1.05
    peak             GiB of the allocator (allocated, and reserved), without and with;  cut: what offload takes off
    host             GiB of pinned memory;  tensors: how many are offloaded, and how many computed again
    hidden           what the plan expects of the copies' time to be hidden, in per cent

The cut is of all that the process holds at its peak, parameters and optimizer included: with P the peak without
offload and B what is held between steps, the compiled function gets a budget of (1 - cut) P - B, less 3 % of P for what
the plan doesn't see (workspaces, rounding, the order in which Inductor adds up). P is measured first, and what needs it
is compiled then; `--peaks llama=25.06,gpt2=38.20` (GiB, of an earlier run) lets both compile at once. The cut in the
table is what this run has measured, in any case.

Rows that `--oom` names are at last tried with 85 % of P: without offload that must fail, and training with it must go
on, with the losses that there are without offload and without the limit.

Results are printed as they come, and with --out kept in DIR/offload.jsonl; then the table of what there is. --jsonl
FILE, with --turns 3, writes what tools/bench/gate.py compares. `--limit`
ends what isn't ready after so many seconds. Rows and modes are measured in the order in which they are named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_RATIO = 1.05
UNSEEN = 0.03  # of the peak
OOM_LIMIT = 0.85
GIB = 2**30


# ---- one side of one row


class Compiled(Exception):
    """Raised in place of the first run."""


class Side:
    """The training step, compiled under one setting of the option."""

    def __init__(self, model: Any, inputs: list[Any], mode: str, option: Any) -> None:
        import torch

        self.model, self.inputs, self.option = model, inputs, option
        self.loss = torch.compile(lambda ids: model(ids), mode=None if mode == "default" else mode)
        self.optimizer: Any = None
        self.reports: list[Any] = []

    def start(self) -> None:
        """A new optimizer, with its state, which a step would make."""
        import torch

        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def compile(self) -> None:
        """Compile the step. It is not run: the device belongs to another process now."""
        import torch
        from torch._inductor.output_code import CompiledFxGraph

        from torch_overlay import config
        from torch_overlay._functorch.offload import log

        undo = log.subscribe(lambda found: self.reports.append(found) if hasattr(found, "choice") else None)
        try:
            with (
                config.patch(activation_offload=self.option),
                torch._functorch.config.patch(force_non_lazy_backward_lowering=True),  # both graphs, before any kernel
                mock.patch.object(CompiledFxGraph, "__call__", side_effect=Compiled),
                contextlib.suppress(Compiled),
            ):
                self.loss(self.inputs[0])
        finally:
            undo()

    def step(self, number: int) -> Any:
        from torch_overlay import config

        with config.patch(activation_offload=self.option):
            loss = self.loss(self.inputs[number % len(self.inputs)])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed(self, steps: int) -> list[float]:
        import torch

        times = []
        for number in range(steps):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.step(number)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return times


def release() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def turn(phase: int) -> Iterator[None]:
    """Waits until it is this process's turn. A process that measures kernels for its plan waits for the end, too."""
    from torch_overlay._functorch.offload import profile_cache

    print(json.dumps({"ready": phase}), flush=True)
    sys.stdin.readline()
    with profile_cache.locked(0, patience=1e9):
        try:
            yield
        finally:
            release()
    print(json.dumps({"done": phase}), flush=True)


def measure(row: str, mode: str, side_name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what is found, part by part."""
    import offload_models  # pyrefly: ignore[missing-import]
    import torch

    from torch_overlay._functorch.offload import profile_cache, runtime
    from torch_overlay._inductor.relaunch import causes

    profile_cache.PATIENCE = 1e9
    began = time.perf_counter()
    length = options.length or offload_models.LENGTHS[row]
    model = offload_models.make(row, length, options.layers)
    inputs = [torch.randint(0, model.vocabulary, (1, length), device="cuda") for _ in range(2)]
    side = Side(model, inputs, mode, None)
    side.start()
    base = torch.cuda.memory_allocated()
    found: dict[str, Any] = {"length": length, "base GiB": base / GIB}
    if side_name == "on":
        budget = (1 - options.cut - UNSEEN) * options.peak * GIB - base
        side.option = {"budget_gb": max(0.0, budget) / 1e9}
        found |= {"budget GB": budget / 1e9}
    compiling = time.perf_counter()
    side.compile()
    found |= {"start s": compiling - began, "compile s": time.perf_counter() - compiling}
    if side_name == "on":
        report = side.reports[-1] if side.reports else None
        found |= {
            "tensors": len(report.rows) if report else 0,
            "again": len(report.choice.recomputed) if report else 0,
            "hidden": report.choice.hidden if report else 1.0,
            "plan": report.summary() if report else "nothing offloaded",
            "planned GB": [report.choice.peak_before / 1e9, report.choice.peak / 1e9] if report else None,
            "planned step ms": report.choice.step_us / 1e3 if report else None,
            "planned exposed ms": report.choice.exposed_us / 1e3 if report else None,
        }
    yield found
    times: list[float] = []
    peak = 0
    for number in range(options.turns):
        with turn(number):
            began = time.perf_counter()
            # A graph is captured at the second call.
            warm = side.timed(1 if number or mode == "default" else 2)
            torch.cuda.reset_peak_memory_stats()
            times += side.timed(options.steps)
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            yield {
                "ms": statistics.median(times),
                "all ms": [round(t, 1) for t in (*warm, *times)],
                "measured ms": times,
                "peak GiB": peak / GIB,
                "reserved GiB": reserved / GIB,
                "host GiB": runtime.live()["bytes"] / GIB,
                "refused": causes.refusals(),
                "measured in s": time.perf_counter() - began,
            }
    if mode == "default" and row in options.oom.split(","):
        with turn(100):
            side.optimizer = None
            torch.cuda.synchronize()
            limit = OOM_LIMIT * (options.peak * GIB if options.peak else peak)
            yield {"oom": out_of_memory(side, row, length, options.layers, limit)}


def out_of_memory(side: Side, row: str, length: int, layers: int | None, limit: float) -> dict[str, Any]:
    """Losses of three steps from new weights: without offload without a limit, and with it under one. What happens
    without offload under the limit."""
    import offload_models  # pyrefly: ignore[missing-import]
    import torch

    def losses() -> list[float] | str:
        release()
        with torch.no_grad():
            new = offload_models.make(row, length, layers)
            for old, value in zip(side.model.parameters(), new.parameters(), strict=True):
                old.copy_(value)
            del new
        try:
            side.start()
            return [side.step(number).item() for number in range(3)]
        except torch.OutOfMemoryError:
            return "OutOfMemoryError"
        finally:
            side.optimizer = None
            side.model.zero_grad(set_to_none=True)

    found: dict[str, Any] = {"limit GiB": limit / GIB}
    if side.option is None:
        found["expected"] = losses()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    found["under the limit"] = losses()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


# ---- all of them


@dataclasses.dataclass
class Child:
    row: str
    mode: str
    side: str
    order: int
    errors: Any
    process: subprocess.Popen[str] | None = None
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: int | None = None  # the phase that it waits to begin

    def begin(self, options: argparse.Namespace, peak: float | None, events: queue.Queue[Any]) -> None:
        # A graph pair from a cache has no plan to report.
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        command = [sys.executable, __file__, "--one", f"{self.row}/{self.mode}/{self.side}", "--oom", options.oom]
        values = {name: getattr(options, name) for name in ("cut", "turns", "steps", "length", "layers")}
        for name, value in {**values, "peak": peak}.items():
            command += [f"--{name}", str(value)] if value is not None else []
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment
        )
        threading.Thread(target=self.read, args=(events,), daemon=True).start()

    def read(self, events: queue.Queue[Any]) -> None:
        assert self.process is not None
        for line in self.process.stdout or ():
            if line.startswith("{"):
                events.put((self, json.loads(line)))
        self.process.wait()
        events.put((self, None))

    def go(self) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.ready = None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def error(self) -> str:
        self.errors.seek(0)
        return f"status {self.process.returncode if self.process else None}: {self.errors.read().strip()[-1500:]}"


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows, as far as they got."""
    known = dict(item.split("=") for item in options.peaks.split(",") if item)
    events: queue.Queue[Any] = queue.Queue()
    with contextlib.ExitStack() as stack:
        children = [
            Child(row, mode, side, order, stack.enter_context(tempfile.TemporaryFile("w+")))
            for order, (row, mode) in enumerate(itertools.product(options.rows.split(","), options.modes.split(",")))
            for side in ("off", "on")
        ]
        stack.callback(lambda: [child.end() for child in children])
        for child in children:
            if child.side == "off" or child.row in known:
                child.begin(options, float(known[child.row]) if child.row in known else None, events)
        _serve(children, events, options)
        return [merged(off, on) for off, on in zip(children[::2], children[1::2])]


def _serve(children: list[Child], events: queue.Queue[Any], options: argparse.Namespace) -> None:
    """Lets one child measure at a time, the earliest phase of the first row first."""
    until = time.monotonic() + options.limit
    left, running = len(children), None
    while left:
        try:
            child, message = events.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return
        pair = [c for c in children if c.order == child.order]
        if message is None or "ready" in message or "done" in message:
            if child is running:
                running = None
            if message is None:
                left -= 1
                if child.process is not None and child.process.returncode:
                    child.found["error"] = child.error()
                    print(json.dumps({"row": child.row, "mode": child.mode, "side": child.side, **child.found}))
                    # Nobody will say what its peak is.
                    left -= sum(c.process is None for c in pair)
            elif "ready" in message:
                child.ready = message["ready"]
        else:
            child.found |= message
            print(json.dumps({"row": child.row, "mode": child.mode, "side": child.side, **message}), flush=True)
            other = pair[1]
            if child.side == "off" and "peak GiB" in message and other.process is None:
                other.begin(options, message["peak GiB"], events)
        waiting = [c for c in children if c.ready is not None]
        if running is None and waiting:
            running = min(waiting, key=lambda c: (c.ready, c.order, c.side == "on"))
            running.go()


def merged(off: Child, on: Child) -> dict[str, Any]:
    found: dict[str, Any] = {"row": off.row, "mode": off.mode}
    for child in (off, on):
        found |= {f"{child.side} {name}": value for name, value in child.found.items() if name not in ON_ALONE}
    found |= {name: on.found[name] for name in ON_ALONE if name in on.found}
    if "ms" in off.found and "ms" in on.found:
        found["ratio"] = on.found["ms"] / off.found["ms"]
        found["cut"] = 1 - on.found["peak GiB"] / off.found["peak GiB"]
    found["refused"] = [text for child in (off, on) for text in child.found.get("refused", ())]
    found["error"] = " | ".join(f"{c.side}: {c.found['error']}" for c in (off, on) if "error" in c.found)
    if not found["error"] and "ratio" not in found:
        found["error"] = "not ready in time"
    return found


ON_ALONE = ("budget GB", "tensors", "again", "hidden", "plan", "planned GB", "host GiB")


def table(results: list[dict[str, Any]], cut: float) -> bool:
    header = ("row", "mode", "off ms", "on ms", "ratio", "peak GiB", "reserved", "cut", "host", "tensors", "hidden")
    rows: list[tuple[str, ...]] = [header]
    notes = []
    passed = True

    def cell(r: dict[str, Any], text: str) -> str:
        """The text with numbers filled in, or nothing where a row didn't get so far."""
        try:
            return text.format(**{name.replace(" ", "_"): value for name, value in r.items()})
        except KeyError:
            return ""

    for r in results:
        passed &= is_good(r, cut)
        percent = {name: 100 * r[name] for name in ("cut", "hidden") if name in r}
        texts = ("{off_ms:.1f}", "{on_ms:.1f}", "{ratio:.3f}", "{off_peak_GiB:.1f} -> {on_peak_GiB:.1f}")
        texts += ("{off_reserved_GiB:.1f} -> {on_reserved_GiB:.1f}", "{cut:.1f} %", "{host_GiB:.1f}")
        texts += ("{tensors} + {again}", "{hidden:.0f} %")
        rows.append((r["row"], r["mode"], *(cell({**r, **percent}, text) for text in texts)))
        name = f"{r['row']} {r['mode']}"
        notes += [f"{name}: {r[key]}" for key in ("error", "plan") if r.get(key)]
        notes += [f"{name}: {text}" for text in r["refused"]]
        if (oom := oom_of(r)) is not None:
            notes.append(f"{name}: {oom}")
    print(*streams.aligned(rows), *notes, sep="\n")
    return passed


def figures(r: dict[str, Any]) -> records.Figures:
    """Figures for the gate: a sample of the time is a step with offload, divided by the same step without."""
    wanted = ("on peak GiB", "on reserved GiB", "host GiB")
    return {
        "device time": {"on / off": records.ratios(r.get("on measured ms", []), r.get("off measured ms", []))},
        "bytes": records.samples([r], wanted),
        "count": {**records.samples([r], ("tensors", "again")), "refused": [len(r["refused"])]},
    }


def is_good(r: dict[str, Any], cut: float) -> bool:
    if r["error"] or "ratio" not in r or r["ratio"] > MOST_RATIO or r["cut"] < cut or r["refused"]:
        return False
    oom = oom_of(r)
    return oom is None or oom.endswith(": ok")


def oom_of(r: dict[str, Any]) -> str | None:
    """In words; None if it was not tried."""
    if "off oom" not in r or "on oom" not in r:
        return None
    off, on = r["off oom"], r["on oom"]
    text = f"under a limit of {on['limit GiB']:.1f} GiB, without offload: {off['under the limit']}, "
    text += f"with it, losses {on['under the limit']}; without either {off['expected']}"
    good = off["under the limit"] == "OutOfMemoryError" and isinstance(on["under the limit"], list)
    good = good and max(abs(a - b) for a, b in zip(off["expected"], on["under the limit"])) < 0.02
    return f"{text}: {'ok' if good else 'failed'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="llama,gpt2")
    parser.add_argument("--modes", default="default,reduce-overhead")
    parser.add_argument("--oom", default="llama", help="rows that are tried with too little memory, too")
    parser.add_argument("--cut", type=float, default=0.4, help="how much of the peak the budget takes off")
    parser.add_argument("--turns", type=records.positive, default=2)
    parser.add_argument("--steps", type=records.positive, default=2, help="measured steps a turn")
    parser.add_argument("--length", type=records.positive, help="tokens, for every row")
    parser.add_argument("--layers", type=records.positive, help="fewer layers, to try the benchmark out")
    parser.add_argument("--peaks", default="", help="what the rows take without offload, if it is known")
    parser.add_argument("--limit", type=records.seconds, default=420, help="seconds")
    parser.add_argument("--out", type=Path)
    records.add_option(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import torch_overlay  # noqa: F401

        row, mode, side = options.one.split("/")
        for found in measure(row, mode, side, options):
            print(json.dumps(found), flush=True)
        os._exit(0)  # to unpin memory and to take everything down takes seconds
    began = time.perf_counter()
    described = streams.describe()
    about = json.dumps({"about": described})
    print(about, flush=True)
    results = run_all(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "offload.jsonl").write_text("\n".join([about, *map(json.dumps, results)]) + "\n")
    measured = {f"{r['row']}, {r['mode']}": figures(r) for r in results if not r["error"]}
    records.write(options.jsonl, described, {"offload": measured})
    passed = table(results, options.cut)
    seconds = time.perf_counter() - began
    print(f"{'all within their limits' if passed else 'not all within their limits'}; {seconds:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
