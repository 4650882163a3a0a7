"""Offloads saved activations where the configuration, a checkpoint policy or a mark of upstream's asks for it."""

from __future__ import annotations

import logging
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config

from torch_overlay import config
from torch_overlay._functorch.offload.checkpoint_policies import note_upstream_marks, OFFLOAD
from torch_overlay._options import offload_settings
from torch_overlay._stream_handling import offloads


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

log = logging.getLogger(__name__)


def holds_memory_at_once() -> bool:
    """True if CUDA graphs are asked for: a launch holds the memory of all its inputs and results until it has ended."""
    return bool(inductor_config.triton.cudagraphs) and config.cudagraphs != "off"


def offload_saved(forward: GraphModule, backward: GraphModule, count: int) -> None:
    """Offload saved activations to the host, if the configuration or a checkpoint policy asks for it."""
    wanted = offload_settings(config)
    if not offloads():
        if wanted is not None:
            log.warning("activation_offload has no effect on code with a C++ or FX wrapper")
        return
    if wanted is None and not any(OFFLOAD in n.meta for n in forward.graph.nodes):
        return
    from torch_overlay._functorch.offload.decision import offload

    offload(forward, backward, count, wanted, holds_memory_at_once())


def enable_activation_offloading(
    original: Callable[..., None], forward: GraphModule, *args: Any, **kwargs: Any
) -> None:
    """Seam: mark the nodes in place of upstream's rewrite; the graphs are rewritten when they are placed on streams."""
    if not (offloads() and torch._functorch.config.activation_offload_separate_stream):
        return original(forward, *args, **kwargs)
    return note_upstream_marks(forward.graph)
