"""How fast a device computes, reads its memory, and copies to and from the host: measured once per process and device.

Three matmuls and four copies, some 30 ms in all, when the first function with offloaded activations is compiled.
Without a device the rates of the data sheet serve, by clock, width and number of multiprocessors, and a PCIe 5 link.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_overlay._functorch.offload_plan import Link
from torch_overlay._inductor.stream_folding import bytes_per_us, flops_per_us


if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

LINK = Link(out=45e3, back=45e3)
SIZE = 1 << 26  # bytes of a measured copy
SIDE = 4096  # of a measured matmul


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per microsecond; `flops` is of 2-byte floats, and other widths scale with the data sheet."""

    link: Link
    bytes: float
    flops: float
    measured: bool

    def flops_of(self, device_index: int, element_size: int) -> float:
        scale = flops_per_us(device_index, element_size) / flops_per_us(device_index, 2)
        return self.flops * scale


def rates(device_index: int) -> Rates:
    try:
        return _measured(device_index)
    except Exception as error:  # no device, or one that is out of memory
        log.info("copy and compute rates are estimates: %s", error)
        return Rates(LINK, 0.8 * bytes_per_us(device_index), 0.5 * flops_per_us(device_index, 2), False)


@functools.cache
def _measured(device_index: int) -> Rates:
    with _disable_current_modes(), torch.cuda.device(device_index), torch.no_grad():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph is being captured")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            return _measure()


def _measure() -> Rates:
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)
    square = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    if not device.is_cuda or isinstance(device, torch._subclasses.FakeTensor):
        raise RuntimeError("there is no device")
    out = _us(lambda: host.copy_(device, non_blocking=True))
    back = _us(lambda: device.copy_(host, non_blocking=True))
    moved = _us(lambda: other.copy_(device))
    matmul = _us(lambda: torch.mm(square, square))
    found = Rates(Link(SIZE / out, SIZE / back), 2 * SIZE / moved, 2 * SIDE**3 / matmul, True)
    log.info("measured rates, in bytes or operations per us: %s", found)
    return found


def _us(work: Callable[[], Any]) -> float:
    """The shortest of three runs, by events of the device."""
    times = []
    with contextlib.suppress(AttributeError):
        work()
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return max(min(times), 1e-3)
