#!/usr/bin/env python3
"""Times `python -m torch_overlay check` beyond compilation, on GPT-2 small with a side stream. Needs no GPU.

    python tools/bench/check.py

GPT-2 small of transformers with random weights, batch 1, 128 tokens; each block's attention output is scaled on a side
stream. The program is compiled for a simulated GPU and run twice on the simulated device, and checked: forward alone,
under mode="reduce-overhead", and with its backward. Printed are the seconds of compilation, the seconds of all else
that the check does (eager run, simulated runs, analysis), and how many operations were simulated. The exit status is 1
if one of the checks takes longer than the limit, 10 s, or finds a race.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]


LIMIT = 10.0
ROWS: dict[str, dict[str, Any]] = {
    "forward": {},
    'forward, mode="reduce-overhead"': {"mode": "reduce-overhead"},
    "forward and backward": {"backward": True},
}


def make() -> tuple[Any, Any]:
    """The model as a function of token ids, and the ids; inside of `simulated_gpu()`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).cuda()
    side = torch.cuda.Stream()

    def beside(module: Any, args: Any, output: Any) -> Any:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            scaled = output[0] @ torch.eye(output[0].shape[-1], device="cuda")
        current.wait_stream(side)
        return (scaled, *output[1:])

    for block in model.transformer.h:
        block.attn.register_forward_hook(beside)  # type: ignore[union-attr]
    return lambda ids: model(ids).logits, torch.zeros(1, 128, dtype=torch.int64, device="cuda")


def measure(**options: Any) -> tuple[float, float, Any]:
    """Seconds of compilation, seconds of the rest, and the report.

    The first call of the compiled function compiles it. Without that it takes as long as a later one.
    """
    import torch

    from torch_overlay.analysis import check
    from torch_overlay.testing import simulated_gpu

    begins: list[float] = []
    with simulated_gpu():
        function, ids = make()
        compiled = torch.compile(function, mode=options.pop("mode", None))

        def step(ids: Any) -> Any:
            begins.append(time.perf_counter())
            return compiled(ids)

        start = time.perf_counter()
        report = check(step, ids, calls=2, compile=False, **options)
        end = time.perf_counter()
    first, *later = begins[2:]  # after two in eager
    checking = first - start + (end - later[0]) * (len(later) + 1) / len(later)
    return end - start - checking, checking, report


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.filterwarnings("ignore")
    print(f"{os.cpu_count()} cores")
    print(f"{'':34}{'compile, s':>12}{'check, s':>12}{'operations':>12}")
    good = True
    for name, arguments in ROWS.items():
        compiling, checking, report = measure(**arguments)
        count = sum(len(trace.operations) for trace in report.traces)
        print(f"{name:34}{compiling:12.1f}{checking:12.1f}{count:12}", flush=True)
        if not report.ok:
            print(report)
        good &= report.ok and checking <= LIMIT
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
