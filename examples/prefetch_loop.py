"""Prefetch loop: the next batch travels to the GPU on a transfer stream while the current one is computed.

Batches come from a pinned ring of host buffers, so the copies are asynchronous. Three promises order the loop, and the
whole step, promises included, is one compiled region:

    wait_stream     the step reads a batch only after its copy has arrived
    record_stream   the batch's memory is not freed to the transfer stream while the step still reads it
    an event        the host refills a buffer of the ring only after its copy has left

    python examples/prefetch_loop.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import torch_overlay  # noqa: F401


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH, FEATURES, LAYERS = 512, 8192, 4


class PinnedBatches:
    """Cuts a data set into batches, each in a page-locked buffer of a small ring.

    Yields a buffer and an event. Whoever copies the buffer to the GPU records the event after the copy: the buffer is
    refilled when that event has happened.
    """

    def __init__(self, data: torch.Tensor, batch: int, slots: int = 3) -> None:
        self.data, self.batch = data, batch
        self.buffers = [torch.empty(batch, *data.shape[1:], pin_memory=True) for _ in range(slots)]
        self.copied = [torch.cuda.Event() for _ in range(slots)]

    def __len__(self) -> int:
        return len(self.data) // self.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.cuda.Event]]:
        for i in range(len(self)):
            slot = i % len(self.buffers)
            self.copied[slot].synchronize()
            self.buffers[slot].copy_(self.data[i * self.batch : (i + 1) * self.batch])
            yield self.buffers[slot], self.copied[slot]


def make_model() -> nn.Module:
    """Scores a batch; its parameters are frozen."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(FEATURES, FEATURES), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(FEATURES, 16)).to("cuda", torch.bfloat16).requires_grad_(False)


def make_step(model: nn.Module, transfer: torch.cuda.Stream) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """One turn of the loop: scores the current batch, and starts the next one's journey."""

    def step(batch: torch.Tensor, host: torch.Tensor, copied: torch.cuda.Event) -> tuple[torch.Tensor, torch.Tensor]:
        compute = torch.cuda.current_stream()
        compute.wait_stream(transfer)
        batch.record_stream(compute)
        with torch.cuda.stream(transfer):
            upcoming = host.to("cuda", non_blocking=True)
            copied.record()
        return model(batch.to(torch.bfloat16)), upcoming

    return step


def run_loop(step: Callable[..., tuple[torch.Tensor, torch.Tensor]], batches: PinnedBatches) -> list[torch.Tensor]:
    """The scores of all batches but the last, whose turn is only to be prefetched."""
    scores = []
    iterator = iter(batches)
    host, copied = next(iterator)
    batch = host.to("cuda", non_blocking=True)
    copied.record()
    for host, copied in iterator:
        score, batch = step(batch, host, copied)
        scores.append(score)
    return scores


def make() -> tuple[Callable[..., object], tuple[object, ...]]:
    """The step, and arguments for one call of it."""
    torch.manual_seed(0)
    step = make_step(make_model(), torch.cuda.Stream())
    host, copied = next(iter(PinnedBatches(torch.randn(BATCH, FEATURES), BATCH)))
    return step, (host.to("cuda"), host, copied)


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            step, args = make()
            compiled = compile_only(step, *args)
        print("No GPU: compiled only. Which operation runs on which stream, and what waits for what:\n")
        print(compiled.plans[0].table())
        return
    torch.manual_seed(0)
    step = make_step(make_model(), torch.cuda.Stream())
    batches = PinnedBatches(torch.randn(16 * BATCH, FEATURES), BATCH)
    results = {}
    for name, function in (("eager", step), ("compiled", torch.compile(step, fullgraph=True))):
        run_loop(function, batches)  # compiles, and warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        results[name] = run_loop(function, batches)
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3 / len(batches)
        print(f"{name:10}{milliseconds:8.2f} ms a batch, the host's own copy into pinned memory included")
    difference = max((a - b).abs().max().item() for a, b in zip(results["eager"], results["compiled"]))
    print(f"largest difference between the two, in {len(results['eager'])} batches of scores: {difference:.2g}")


if __name__ == "__main__":
    main()
