"""A training loop that copies the next batch while this one trains.

The copy is ordinary code on a transfer stream. The model is compiled: a side stream in its forward computes an
auxiliary loss beside the main one, so the backward has two branches, too, which run where their forwards ran. What to
see: the losses of both loops are the same, and the loop that copies while it trains takes less time.

    python examples/train_prefetch_loop.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import torch_overlay  # noqa: F401


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, CLASSES, BATCH, STEPS = 2048, 1000, 8192, 30


class Classifier(nn.Module):
    """A classifier with an auxiliary head, whose loss is computed on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head, self.auxiliary = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 64)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            auxiliary = nn.functional.cross_entropy(self.auxiliary(hidden), labels % 64)
        loss = nn.functional.cross_entropy(self.head(hidden), labels)
        current.wait_stream(self.side)
        return loss + 0.1 * auxiliary


class Prefetcher:
    """Pinned batches, copied on a transfer stream one step before the step that uses them."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]], overlapped: bool) -> None:
        self.batches, self.overlapped = batches, overlapped
        self.transfer = torch.cuda.Stream()

    def copy(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not self.overlapped:
            return tuple(t.to("cuda") for t in batch)
        with torch.cuda.stream(self.transfer):
            return tuple(t.to("cuda", non_blocking=True) for t in batch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        following = self.copy(self.batches[0])
        for i in range(len(self.batches)):
            current, batch = torch.cuda.current_stream(), following
            if self.overlapped:
                current.wait_stream(self.transfer)
                for tensor in batch:
                    tensor.record_stream(current)
            if i + 1 < len(self.batches):
                following = self.copy(self.batches[i + 1])
            yield batch


def make() -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
    """The model, and one batch for it."""
    torch.manual_seed(0)
    model = Classifier().to("cuda")
    x = torch.randn(BATCH, WIDTH, device="cuda")
    return model, (x, torch.randint(0, CLASSES, (BATCH,), device="cuda"))


def train(overlapped: bool) -> tuple[list[float], float]:
    """Losses of the steps, and milliseconds a step."""
    torch.manual_seed(0)
    model = Classifier().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    step = torch.compile(model, fullgraph=True)
    batches = [
        (torch.randn(BATCH, WIDTH).pin_memory(), torch.randint(0, CLASSES, (BATCH,)).pin_memory()) for _ in range(4)
    ]
    losses, start = [], 0.0
    for number, (x, labels) in enumerate(Prefetcher(batches * (STEPS // 4 + 1), overlapped)):
        if number == 8:  # compiled, and warm
            torch.cuda.synchronize()
            start = time.perf_counter()
        loss = step(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return [loss.item() for loss in losses], (time.perf_counter() - start) * 1e3 / (len(losses) - 8)


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            function, args = make()
            compiled = compile_only(function, *args, backward=True)
        for kind, plan in zip(("forward", "backward"), compiled.plans):
            print(f"No GPU: compiled only. The {kind}: which operation runs where, and what waits for what:\n")
            print(plan.table(), end="\n\n")
        return
    plain, slow = train(overlapped=False)
    prefetched, fast = train(overlapped=True)
    print(f"copy, then train:     {slow:6.2f} ms a step, last loss {plain[-1]:.6f}")
    print(f"copy while training:  {fast:6.2f} ms a step, last loss {prefetched[-1]:.6f}")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(plain, prefetched)):.2g}")


if __name__ == "__main__":
    main()
