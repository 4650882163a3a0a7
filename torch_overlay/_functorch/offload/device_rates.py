"""Measures how fast a device computes, reads its memory, and copies to and from the host: once, kept on disk.

A matmul and three copies are timed, some 30 ms in all, when the first function with offloaded activations is compiled
on a machine (`offload.profile_cache`). Without a device, the rates are estimates: by its properties, and for a PCIe 5
link.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_overlay._functorch.device_peaks import bytes_per_us, flops_per_us
from torch_overlay._functorch.offload import profile_cache
from torch_overlay._functorch.offload.cost_model import Link


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

LINK = Link(out=45e3, back=45e3)
SIZE = 1 << 26  # bytes of a measured copy
SIDE = 4096  # rows and columns of a measured matmul
OUT, BACK, MEMORY, FLOPS = "bytes/us to the host", "bytes/us from the host", "bytes/us of memory", "flops/us of bf16"


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per microsecond; `flops` is for 2-byte floats, other widths scale as the peaks do."""

    link: Link
    bytes: float
    flops: float
    measured: bool

    def flops_of(self, device_index: int, element_size: int) -> float:
        scale = flops_per_us(device_index, element_size) / flops_per_us(device_index, 2)
        return self.flops * scale


def rates(device_index: int) -> Rates:
    try:
        found = profile_cache.profile(device_index).get([OUT, BACK, MEMORY, FLOPS], lambda _: _measure(device_index))
        return Rates(Link(found[OUT], found[BACK]), found[MEMORY], found[FLOPS], True)
    except Exception as error:  # no device, or one that is out of memory
        log.info("copy and compute rates are estimates: %s", error)
        return Rates(LINK, 0.8 * bytes_per_us(device_index), 0.5 * flops_per_us(device_index, 2), False)


@contextlib.contextmanager
def measuring(device_index: int) -> Iterator[None]:
    """Prepare for measurements on the device while something is being compiled: tensors inside are real ones, their
    memory is freed at the end, and the state of the random number generators is restored."""
    with _disable_current_modes(), torch.cuda.device(device_index), torch.no_grad():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph is being captured")
        if isinstance(torch.empty(1, device="cuda"), torch._subclasses.FakeTensor):
            raise RuntimeError("there is no device")
        with torch.random.fork_rng([device_index]):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                yield


def _measure(device_index: int) -> dict[str, float]:
    with measuring(device_index):
        host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(device)
        square = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
        result = torch.empty_like(square)
        found = {
            OUT: SIZE / shortest_us(lambda: host.copy_(device, non_blocking=True)),
            BACK: SIZE / shortest_us(lambda: device.copy_(host, non_blocking=True)),
            MEMORY: 2 * SIZE / shortest_us(lambda: other.copy_(device)),
            FLOPS: 2 * SIDE**3 / shortest_us(lambda: torch.mm(square, square, out=result)),
        }
    log.info("measured rates: %s", found)
    return found


LONG = 20e3  # us: work that takes longer is timed once


def shortest_us(work: Callable[[], Any]) -> float:
    """Return the time of the shortest of three runs after a warm-up, by events of the device; for long work, of one."""
    work()
    times: list[float] = []
    while len(times) < 3 and not (times and times[0] > LONG):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return max(min(times), 1e-3)
