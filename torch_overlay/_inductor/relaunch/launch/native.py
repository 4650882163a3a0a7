"""Wraps the part of the C module that patches executables and launches them.

*Patching.* `Exec(exec_handle, nodes, slots, regions)` makes the `Blocks` of a template (`launch.blocks`), which has
`patch(bases)` (`csrc/patch.c`).

*Calling.* `call(...)` of an Exec makes an object that does a whole relaunch in one call (`csrc/bind.c`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import csrc
from torch_overlay._inductor.relaunch.launch import data_ptrs
from torch_overlay._inductor.relaunch.launch.blocks import make_blocks
from torch_overlay._inductor.relaunch.proof.nodes import KernelNode, Refusal


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Template

log = logging.getLogger(__name__)

TORCH_FUNCTIONS = (
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
)


def complete(module: Any) -> Any:
    """Prepare `relaunch` of the extension module: teach it the fields of tensors, and add `Exec`."""
    data_ptrs.teach(module)
    module.Exec = functools.partial(make_blocks, module)
    return module


@functools.cache
def implementation() -> Any:
    """Return the C module, one a process. Raise `Refusal` if it can't be built: then there are no CUDA graphs."""
    try:
        return complete(csrc.extension().relaunch)
    except csrc.NotBuiltError as error:
        raise Refusal("c-module", str(error)) from None


def _built() -> Any:
    """Return the C module if `implementation` has built it already; else None."""
    return implementation() if implementation.cache_info().currsize else None


@functools.cache
def torch_functions() -> tuple[int, ...]:
    """Return the addresses of torch's C functions that get the current stream of a device, and allocate and free
    memory. Torch's Python functions do the same, and take a microsecond longer."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
        functions = [getattr(library, name) for name in TORCH_FUNCTIONS]
    except (OSError, AttributeError) as error:
        log.info("relaunches ask torch's Python functions for memory (%s)", error)
        return (0,) * len(TORCH_FUNCTIONS)
    return tuple([ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions])


def launching() -> bool:
    """True if this thread is in the middle of a launch by the C module."""
    module = _built()
    return module is not None and module.launching()


def shared(template: Template, order: Sequence[int] | None = None) -> Any:
    """Return the `Shared` for an executable of the template's graph. `order`: that of the nodes, if kernels may be
    launched one by one."""
    return implementation().Shared(_count(template), None if order is None else _launches(template, order))


def apart(template: Template, order: Sequence[int]) -> Any:
    """Return a `Shared` for a template without an executable, whose kernels are always launched one by one."""
    return implementation().Shared(_count(template), _launches(template, order), True)


def _count(template: Template) -> int:
    return 1 + max((node.index for node in template.nodes), default=-1)


def _launches(template: Template, order: Sequence[int]) -> tuple[tuple[int, bytes], ...]:
    kernels = {node.index: node.attributes for node in template.nodes if isinstance(node, KernelNode)}
    return tuple([(index, kernels[index]) for index in order if index in kernels])
