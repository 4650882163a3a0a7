"""Says whose streams are: where they are the overlay's to handle, and where upstream's."""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay import config


def handles_streams() -> bool:
    """True if the streams of what is being traced or compiled are the overlay's to handle. They are upstream's in code
    for an FX wrapper, and in what torch.export traces. AOTInductor compiles that, and there they are the overlay's.
    """
    is_exporting = torch.compiler.is_exporting() and not V.aot_compilation
    others = is_exporting or inductor_config.fx_wrapper
    return config.streams and not others


def offloads() -> bool:
    """True if saved activations may be offloaded to the host: the copies are calls of Python."""
    return handles_streams() and not inductor_config.cpp_wrapper


__all__ = ["handles_streams", "offloads"]
