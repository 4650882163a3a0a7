"""What the first capture would have to wait for, beforehand: the C module, the driver's bindings, and the kernels that
stand in for memset and memcpy nodes.

Where Inductor waits for its workers to compile kernels, this process has nothing else to do, and it is done there.
Where nothing is compiled, or it fails, it is a part of the first call.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config


if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


@functools.cache
def prepare(device: int) -> None:
    """On the current device. Raises what the loader raises where there is no driver."""
    from torch_overlay._inductor.relaunch.graph import driver, fill_copy_kernels
    from torch_overlay._inductor.relaunch.launch import native

    native.implementation()
    driver.Driver()
    try:
        fill_copy_kernels.prepare(device)
    except Exception as error:  # Triton's own among them; `graph.read.tidy` meets it again, and reports it
        log.info("memset and memcpy nodes will stay in captured graphs: %s", error)


def wait(original: Callable[[Any, dict[str, Any]], None], compiler: Any, scope: dict[str, Any]) -> None:
    """Seam of AsyncCompile.wait."""
    import torch._inductor.config as inductor_config

    if inductor_config.triton.cudagraphs and config.cudagraphs == "relaunch" and _may_load_modules():
        _try(torch.cuda.current_device())
    original(compiler, scope)


def _may_load_modules() -> bool:
    """On the current device. One that the process hasn't used yet stays unused, for a context takes hundreds of MiB of
    it; and a capture of the caller's may forbid it."""
    if not torch.cuda.is_initialized() or not torch._C._cuda_hasPrimaryContext(torch.cuda.current_device()):
        return False
    return not torch.cuda.is_current_stream_capturing()


@functools.cache
def _try(device: int) -> None:
    try:
        prepare(device)
    except Exception as error:  # whoever needs it says so
        log.info("a capture can't be prepared for yet: %s", error)
