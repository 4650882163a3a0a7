"""Allocates host memory in blocks of gigabytes, pins it, and reports how much the host has left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import logging
import mmap
import os
from typing import Any

import torch


log = logging.getLogger(__name__)


def allocate(nbytes: int) -> mmap.mmap:
    """Return memory of whole pages that nothing else is in; at least one byte."""
    memory = mmap.mmap(-1, max(nbytes, 1))
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # pinning takes time per page
    return memory


POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
PART = 256 << 20  # bytes that a thread populates at a time


def populate(address: int, nbytes: int) -> None:
    """Have the system allocate the pages, from several threads; pinning would allocate them one after the other, in
    some seconds for 10 GB. Where the system can't do that, it is left to the pinning."""
    parts = [(address + at, min(PART, nbytes - at)) for at in range(0, nbytes, PART)]
    if len(parts) < 2:
        return
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
        with concurrent.futures.ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1, 16)) as pool:
            for failed in pool.map(lambda part: madvise(*part, POPULATE_WRITE), parts):
                if failed:
                    log.info("pages were not made beforehand: errno %d", ctypes.get_errno())
                    break


def pin(address: int, nbytes: int) -> int:
    """Pin the memory for every device. Return 0, or the error of the CUDA runtime."""
    runtime: Any = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(address, nbytes, 1)):
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).cudaGetLastError()  # or torch raises the error after the next launch of a kernel
    return code


def unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def available_bytes() -> int | None:
    """Return the host memory that is still available, by the kernel's account and that of the process's control group;
    None if neither is known."""
    found = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError), open(limit) as most, open(used) as now:
            found.append(int(most.read()) - int(now.read()))
    return max(min(found), 0) if found else None


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def gigabytes(nbytes: int) -> str:
    """Return a number of gigabytes of 10^9 bytes, rounded up to four digits: an advice of that many is enough."""
    step = 10 ** max(len(str(nbytes)) - 4, 0)
    return f"{-(-nbytes // step) * step / 1e9:.4g}"
