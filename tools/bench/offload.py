#!/usr/bin/env python3
"""What activation offload costs: training steps with a budget that cuts peak memory by 40 %, against the same without.

    python tools/bench/offload.py [--rows gpt2,llama] [--modes default,reduce-overhead] [--cut 0.4] [--out DIR]

GPT-2 medium and a Llama of 16 layers, random weights, bfloat16, one long sequence, AdamW. Every row and mode is a
process of its own, which compiles the step twice, without offload and with it, and measures them in turns: a figure is
the median of steps between two events of the device. Processes compile side by side and measure one at a time.

    off, on          ms a step without offload and with it;  ratio: on / off, at most 1.05
    peak             GiB of the allocator (allocated, and reserved), without and with;  cut: what offload takes off
    host             GiB of pinned memory;  tensors: how many are offloaded
    hidden           what the plan expects of the copies' time to be hidden;  graphs: refused regions, if any

The row `oom` limits the process to less memory than the step without offload needs: that one must fail, and training
with offload must go on, with the losses that it has without the limit and without offload.

A JSON line for each row goes to stdout before the table and, with --out, to DIR/offload.jsonl.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import streams  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = {"gpt2": 49152, "llama": 57344}
MOST_RATIO, LEAST_CUT = 1.05, 0.38
GIB = 2**30


# ---- one row in one mode


def make_model(row: str, length: int, layers: int | None) -> Any:
    """A model whose attention is causal without a mask, which would be as large as the square of the length."""
    import torch
    import transformers as hf
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *args, **kwargs: None)
    config: Any
    cls: Any
    if row == "gpt2":
        rates: Any = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = hf.GPT2Config(
            n_embd=1024, n_layer=layers or 24, n_head=16, n_positions=length, use_cache=False, **rates
        )
        cls = hf.GPT2LMHeadModel
    else:
        config = hf.LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers or 16,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=32000,
            max_position_embeddings=length,
            use_cache=False,
        )
        cls = hf.LlamaForCausalLM
    config._attn_implementation = "causal"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = cls(config)  # pyrefly: ignore[bad-argument-type]
    model.loss_type = "ForCausalLM"  # GPT-2's is not known by name, and a warning would break the graph
    return model.bfloat16().train()


class Side:
    """The training step, compiled under one setting of the option."""

    def __init__(self, model: Any, inputs: list[Any], mode: str) -> None:
        import torch

        self.model, self.inputs = model, inputs

        def loss(ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids=ids, labels=ids).loss

        # Dynamo keeps what it compiles with the code object: each side has one of its own.
        own = types.FunctionType(loss.__code__.replace(), globals(), "loss", None, loss.__closure__)
        self.loss = torch.compile(own, mode=None if mode == "default" else mode)
        self.option: Any = None
        self.reports: list[Any] = []

    def compile(self, option: Any) -> None:
        """Compile the step. It is not run: the device belongs to another process now."""
        import torch

        from torch_overlay import config
        from torch_overlay._functorch import offload_log

        self.option = option
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 512 * 2**20) / total)
        undo = offload_log.subscribe(lambda found: self.reports.append(found) if hasattr(found, "choice") else None)
        try:
            with (
                config.patch(activation_offload=option),
                torch._functorch.config.patch(force_non_lazy_backward_lowering=True),  # both graphs, before any kernel
                contextlib.suppress(torch.OutOfMemoryError),
            ):
                self.loss(self.inputs[0]).backward()
        finally:
            undo()
            torch.cuda.set_per_process_memory_fraction(1.0)
        self.model.zero_grad(set_to_none=True)
        release()

    def step(self, optimizer: Any, number: int) -> Any:
        from torch_overlay import config

        with config.patch(activation_offload=self.option):
            loss = self.loss(self.inputs[number % len(self.inputs)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed(self, optimizer: Any, steps: int) -> list[float]:
        import torch

        times = []
        for number in range(steps):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.step(optimizer, number)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return times

    def memory(self, optimizer: Any, steps: int) -> tuple[int, int, int]:
        """Bytes allocated between steps, allocated at the peak, and reserved at the peak."""
        import torch

        torch.cuda.synchronize()
        release()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.timed(optimizer, steps)
        return base, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def release() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def alone(lock: str) -> Iterator[None]:
    """One process at a time has the device."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            release()


def measure(row: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_overlay._inductor import offload_runtime
    from torch_overlay._inductor.cudagraphs import policy

    length = options.length or LENGTHS[row]
    model = make_model(row, length, options.layers)
    inputs = [torch.randint(0, model.config.vocab_size, (1, length), device="cuda") for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    began = time.perf_counter()
    off, on = Side(model, inputs, mode), Side(model, inputs, mode)
    off.compile(None)
    with alone(options.lock):
        off.timed(optimizer, 3)
        base, peak, reserved = off.memory(optimizer, 1)
    budget = max(0.0, (1 - options.cut) * peak - base) / 1e9
    on.compile({"budget_gb": budget})
    compiled = time.perf_counter() - began
    with alone(options.lock):
        on.timed(optimizer, 3)
        _, peak_on, reserved_on = on.memory(optimizer, 1)
        times: dict[str, list[float]] = {"off": [], "on": []}
        for turn in range(options.turns):
            for name, side in [("off", off), ("on", on)][:: 1 if turn % 2 == 0 else -1]:
                release()
                times[name] += side.timed(optimizer, 1 + options.steps)[1:]
    choice = on.reports[0].choice if on.reports else None
    found = {
        "off ms": statistics.median(times["off"]),
        "on ms": statistics.median(times["on"]),
        "all ms": {name: [round(t, 1) for t in list_] for name, list_ in times.items()},
        "base GiB": base / GIB,
        "budget GB": budget,
        "peak off GiB": peak / GIB,
        "peak on GiB": peak_on / GIB,
        "reserved off GiB": reserved / GIB,
        "reserved on GiB": reserved_on / GIB,
        "host GiB": offload_runtime.live()["bytes"] / GIB,
        "tensors": len(on.reports[0].rows) if on.reports else 0,
        "hidden": choice.hidden if choice else 1.0,
        "plan": on.reports[0].summary() if on.reports else "nothing offloaded",
        "refused": policy.refusals(),
        "compile s": compiled,
    }
    found["ratio"] = found["on ms"] / found["off ms"]
    found["cut"] = 1 - peak_on / peak
    if mode == "default":
        with alone(options.lock):
            # Room for what offload reserves, and a second optimizer; but less than the step without it allocates.
            limit = min(int(0.97 * peak), max(reserved_on, (peak + peak_on) // 2))
            found["oom"] = out_of_memory(model, off, on, limit)
    return found


def out_of_memory(model: Any, off: Side, on: Side, limit: int) -> dict[str, Any]:
    """Losses of some steps without limit and offload, and with both; and what happens with the limit alone."""
    import torch

    start = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def losses(side: Side) -> list[float]:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(start[name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        try:
            return [side.step(optimizer, number).item() for number in range(3)]
        finally:
            del optimizer
            model.zero_grad(set_to_none=True)
            release()

    expected = losses(off)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        losses(off)
        failed = "it did not run out of memory"
    except torch.OutOfMemoryError:
        failed = "OutOfMemoryError"
    release()
    try:
        with_offload = losses(on)
    except torch.OutOfMemoryError as error:
        return {"limit GiB": limit / GIB, "without": failed, "with": f"OutOfMemoryError: {error}"[:300]}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    difference = max(abs(a - b) for a, b in zip(expected, with_offload))
    return {
        "limit GiB": limit / GIB,
        "without": failed,
        "with": "trains",
        "losses": with_offload,
        "expected": expected,
        "difference": difference,
    }


# ---- all of them


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        lock = str(Path(folder) / "device")
        processes = []
        for row in options.rows.split(","):
            for mode in options.modes.split(","):
                command = [sys.executable, __file__, "--one", f"{row}/{mode}", "--lock", lock]
                for name in ("cut", "turns", "steps", "length", "layers"):
                    if (value := getattr(options, name)) is not None:
                        command += [f"--{name}", str(value)]
                started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                processes.append((row, mode, started))
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            answers = list(pool.map(answer, [process for *_, process in processes]))
        return [{"row": row, "mode": mode, **found} for (row, mode, _), found in zip(processes, answers)]


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    for line in out.splitlines():
        if line.startswith('{"off ms"'):
            return json.loads(line)
    return {"error": f"status {process.returncode}: {err.strip()[-1500:]}"}


def table(results: list[dict[str, Any]]) -> bool:
    header = ("row", "mode", "off ms", "on ms", "ratio", "peak GiB", "reserved", "cut", "host", "tensors", "hidden")
    rows: list[tuple[str, ...]] = [header]
    passed = True
    notes = []
    for r in results:
        if "error" in r:
            rows.append((r["row"], r["mode"], "failed", *[""] * (len(header) - 3)))
            notes.append(f"{r['row']} {r['mode']}: {r['error']}")
            passed = False
            continue
        passed &= r["ratio"] <= MOST_RATIO and r["cut"] >= LEAST_CUT and not r["refused"]
        rows.append(
            (
                r["row"],
                r["mode"],
                f"{r['off ms']:.1f}",
                f"{r['on ms']:.1f}",
                f"{r['ratio']:.3f}",
                f"{r['peak off GiB']:.1f} -> {r['peak on GiB']:.1f}",
                f"{r['reserved off GiB']:.1f} -> {r['reserved on GiB']:.1f}",
                f"{100 * r['cut']:.0f} %",
                f"{r['host GiB']:.1f}",
                str(r["tensors"]),
                f"{100 * r['hidden']:.0f} %",
            )
        )
        notes.append(f"{r['row']} {r['mode']}: {r['plan']}")
        notes += [f"{r['row']} {r['mode']}: {text}" for text in r["refused"]]
        if oom := r.get("oom"):
            good = oom["without"] == "OutOfMemoryError" and oom["with"] == "trains" and oom["difference"] < 0.02
            passed &= good
            notes.append(f"{r['row']} oom: {json.dumps(oom)}")
    widths = [max(len(row[c]) for row in rows) for c in range(len(header))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(*notes, sep="\n")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="gpt2,llama")
    parser.add_argument("--modes", default="default,reduce-overhead")
    parser.add_argument("--cut", type=float, default=0.4, help="how much of the peak the budget takes off")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps a turn")
    parser.add_argument("--length", type=int, help="tokens, for every row")
    parser.add_argument("--layers", type=int, help="fewer layers, to try the benchmark out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import torch_overlay  # noqa: F401

        row, mode = options.one.split("/")
        print(json.dumps(measure(row, mode, options)), flush=True)
        return 0
    began = time.perf_counter()
    results = run_all(options)
    lines = [json.dumps({"about": streams.describe()}), *map(json.dumps, results)]
    print(*lines, sep="\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "offload.jsonl").write_text("\n".join(lines) + "\n")
    passed = table(results)
    print(
        f"{'all within their limits' if passed else 'not all within their limits'}; {time.perf_counter() - began:.0f} s"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
