#!/usr/bin/env python3
"""Measures activation offload: training steps with a budget that cuts peak memory by 40 %, against the same without.

    python tools/bench/offload.py [--rows llama,gpt2] [--modes default,reduce-overhead] [--out DIR]

GPT-2 medium and a Llama of 16 layers on one long sequence (`offload_models`), bfloat16, AdamW. Each row and mode has
two processes, without offload and with it, with equal weights and inputs. All compile side by side, and measure one at
a time: a figure is the median of steps between two events of the device.

    off, on          ms a step without offload and with it;  ratio: on / off, at most 1.05
    peak             GiB of the allocator (allocated, and reserved), without and with;  cut: what offload takes off
    host             GiB of pinned memory;  tensors: how many are offloaded, and how many computed again
    hidden           what the plan expects of the copies' time to be hidden, in per cent

The cut is of all that the process holds at its peak, parameters and optimizer included: with P the peak without
offload and B what is held between steps, the compiled function gets a budget of 0.6 P - B, less 3 % of P for what
the plan doesn't see (workspaces, rounding, the order in which Inductor adds up). P is measured first, and what needs it
is compiled then; `--peaks llama=25.06,gpt2=38.20` (GiB, of an earlier run) lets both compile at once. The cut in the
table is what this run has measured, in any case.

Rows that `--oom` names are at last tried with 85 % of P: without offload that must fail, and training with it must go
on, with the losses that there are without offload and without the limit.

Results are printed as they come, and with --out kept in DIR/offload.jsonl; then the table of what there is. --jsonl
FILE, with --turns 3, writes what tools/bench/gate.py compares. `--limit` ends what isn't ready after so many seconds.
Rows and modes are measured in the order in which they are named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import processes  # noqa: E402  # pyrefly: ignore[missing-import]
import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]


OPTIONS = "OFFLOAD_OPTIONS"  # variable of the environment of a process: JSON of its options
MOST_RATIO = 1.05
CUT, UNSEEN = 0.4, 0.03  # of the peak
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


class _Served:
    """A process of a row, a mode and a side. The device is its alone while it measures: a process that measures kernels
    for its plan waits for that, too."""

    def __init__(self, row: str, side: str) -> None:
        import offload_models  # pyrefly: ignore[missing-import]
        import torch

        import torch_overlay  # noqa: F401
        from torch_overlay._functorch.offload import profile_cache

        profile_cache.PATIENCE = 1e9
        self.options = options = argparse.Namespace(**json.loads(os.environ[OPTIONS]))
        self.row, _, self.mode = row.partition("/")
        self.length = offload_models.LENGTHS[self.row]
        model = offload_models.make(self.row, self.length, options.layers)
        inputs = [torch.randint(0, model.vocabulary, (1, self.length), device="cuda") for _ in range(2)]
        self.side = Side(model, inputs, self.mode, None)
        self.side.start()
        self.base, self.peak = torch.cuda.memory_allocated(), 0
        self.times: list[float] = []
        if side == "on":
            budget = (1 - CUT - UNSEEN) * options.peak * GIB - self.base
            self.side.option = {"budget_gb": max(0.0, budget) / 1e9}

    def compile(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.side.compile()
        found = {"length": self.length, "base GiB": self.base / GIB, "compile s": time.perf_counter() - begin}
        if self.side.option is None:
            return found
        report = self.side.reports[-1] if self.side.reports else None
        return found | {
            "budget GB": self.side.option["budget_gb"],
            "tensors": len(report.rows) if report else 0,
            "again": len(report.choice.recomputed) if report else 0,
            "hidden": report.choice.hidden if report else 1.0,
            "plan": report.summary() if report else "nothing offloaded",
        }

    def measure(self) -> dict[str, Any]:
        import torch

        from torch_overlay._functorch.offload import profile_cache, runtime
        from torch_overlay._inductor.relaunch import causes

        with profile_cache.locked(0):
            # A graph is captured at the second call.
            self.side.timed(1 if self.times or self.mode == "default" else 2)
            torch.cuda.reset_peak_memory_stats()
            self.times += self.side.timed(self.options.steps)
            self.peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            host = runtime.live()["bytes"]
            release()
        return {
            "ms": statistics.median(self.times),
            "measured ms": self.times,
            "peak GiB": self.peak / GIB,
            "reserved GiB": reserved / GIB,
            "host GiB": host / GIB,
            "refused": causes.refusals(),
        }

    def oom(self) -> dict[str, Any]:
        import torch

        from torch_overlay._functorch.offload import profile_cache

        with profile_cache.locked(0):
            self.side.optimizer = None
            torch.cuda.synchronize()
            limit = OOM_LIMIT * (self.options.peak * GIB if self.options.peak else self.peak)
            return {"oom": out_of_memory(self.side, self.row, self.length, self.options.layers, limit)}


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


@dataclasses.dataclass(eq=False)
class Child:
    row: str
    mode: str
    side: str
    process: processes.Process | None = None
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    def begin(self, options: argparse.Namespace, peak: float | None) -> None:
        """Start the process, which compiles beside the others."""
        given = {name: getattr(options, name) for name in ("steps", "layers")} | {"peak": peak}
        # A graph pair from a cache has no plan to report.
        own = {"TORCHINDUCTOR_COMPILE_THREADS": "3", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0", OPTIONS: json.dumps(given)}
        self.process = processes.Process(f"{self.row}/{self.mode}", self.side, os.environ | own, __file__)
        self.process.tell("compile")

    def note(self, until: float, word: str = "") -> None:
        """Wait for an answer to the word, or to "compile", and note it. A process that failed is asked no more."""
        if self.process is None or "error" in self.found:
            return
        if word:
            self.process.tell(word)
        message = self.process.answer(until - time.monotonic())
        self.found |= message
        print(json.dumps({"row": self.row, "mode": self.mode, "side": self.side, **message}), flush=True)


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows, as far as they got. One process measures at a time; in a turn, those come last whose budget depends on
    a peak that is measured in it."""
    until = time.monotonic() + options.limit
    known = {row: float(peak) for row, _, peak in (item.partition("=") for item in options.peaks.split(",") if item)}
    rows = itertools.product(options.rows, options.modes)
    pairs = [(Child(row, mode, "off"), Child(row, mode, "on")) for row, mode in rows]
    children = {child: on for off, on in pairs for child in (off, on)}
    try:
        for child in children:
            if child.side == "off" or child.row in known:
                child.begin(options, known.get(child.row))
        for number in range(options.turns):
            for child in sorted(children, key=lambda child: child.process is None):
                if number == 0:
                    child.note(until)
                child.note(until, "measure")
                if "peak GiB" in child.found and (on := children[child]).process is None:
                    on.begin(options, child.found["peak GiB"])
        for child in children:
            if child.mode == "default" and child.row in options.oom:
                child.note(until, "oom")
    finally:
        for child in children:
            if child.process is not None:
                child.process.stop()
    return [merged(off, on) for off, on in pairs]


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
    return found


ON_ALONE = ("budget GB", "tensors", "again", "hidden", "plan", "host GiB")


def table(results: list[dict[str, Any]]) -> bool:
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
        passed &= is_good(r)
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


def is_good(r: dict[str, Any]) -> bool:
    if r["error"] or "ratio" not in r or r["ratio"] > MOST_RATIO or r["cut"] < CUT or r["refused"]:
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
    rows, modes = ("llama", "gpt2"), ("default", "reduce-overhead")
    parser.add_argument("--rows", type=records.names(rows), default=rows, help="of llama, gpt2")
    parser.add_argument("--modes", type=records.names(modes), default=modes, help="of default, reduce-overhead")
    parser.add_argument(
        "--oom", type=records.names(rows, least=0), default=rows[:1], help="rows with too little memory, too"
    )
    parser.add_argument("--turns", type=records.positive, default=2)
    parser.add_argument("--steps", type=records.positive, default=2, help="measured steps a turn")
    parser.add_argument("--layers", type=records.positive, help="fewer layers, to try the benchmark out")
    parser.add_argument("--peaks", default="", help="what the rows take without offload, if it is known")
    parser.add_argument("--limit", type=records.seconds, default=420, help="seconds")
    parser.add_argument("--out", type=Path)
    records.add_option(parser)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        processes.serve(lambda: _Served(*options.serve))
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
    passed = table(results)
    seconds = time.perf_counter() - began
    print(f"{'all within their limits' if passed else 'not all within their limits'}; {seconds:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
