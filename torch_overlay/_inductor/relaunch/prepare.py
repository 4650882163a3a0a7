"""Loads in advance what the first capture needs: the C module, the driver's bindings, and the kernels that replace
memset and memcpy nodes.

`prepare_early` is for the time while Inductor waits for its workers to compile kernels, when this process has nothing
else to do. If nothing is compiled, or the preparation fails then, it is a part of the first call.
"""

from __future__ import annotations

import functools
import logging

import torch


log = logging.getLogger(__name__)


@functools.cache
def prepare(device: int) -> None:
    """Load all that a capture on the current device needs. Raises what the loader raises where there is no driver."""
    from torch_overlay._inductor.relaunch.graph import fill_copy_kernels, native_read
    from torch_overlay._inductor.relaunch.launch import native

    native.implementation()
    native_read.NativeDriver()
    try:
        fill_copy_kernels.prepare(device)
    except Exception as error:  # also Triton's own errors; `graph.tidy` gets the error again, and reports it
        log.info("memset and memcpy nodes will stay in captured graphs: %s", error)


def prepare_early() -> None:
    """Prepare for captures on the current device before there is one, if modules may be loaded there. What fails is
    logged once."""
    if _may_load_modules():
        _try(torch.cuda.current_device())


def _may_load_modules() -> bool:
    """True if modules may be loaded on the current device: the process has a context there already (a new context would
    take hundreds of MiB of the device), and the current stream is not being captured, which may forbid it."""
    if not torch.cuda.is_initialized() or not torch._C._cuda_hasPrimaryContext(torch.cuda.current_device()):
        return False
    return not torch.cuda.is_current_stream_capturing()


@functools.cache
def _try(device: int) -> None:
    try:
        prepare(device)
    except Exception as error:  # a capture that needs it will report it
        log.info("a capture can't be prepared for yet: %s", error)
