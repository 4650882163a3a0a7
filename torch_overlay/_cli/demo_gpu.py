"""Runs demo programs on the GPU: one process, one form of PyTorch, results as JSON.

    python -m torch_overlay._cli.demo_gpu RESULT.json PROGRAM ...

With TORCH_OVERLAY_DISABLE=1 it runs them under stock PyTorch. The file is written anew after every program, so if a
program crashes the process, the results of the programs before it remain.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.utils._pytree as pytree

from torch_overlay._cli.demo import load
from torch_overlay.analysis.overlap import device_work, overlap


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
