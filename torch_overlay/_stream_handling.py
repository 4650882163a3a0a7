"""Says whose streams are: where they are the overlay's to handle, and where upstream's."""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config

from torch_overlay import config


def handles_streams() -> bool:
    """True if the streams of what is being traced or compiled are the overlay's to handle. They are upstream's in code
    for a C++ or FX wrapper, and in what torch.export traces, which AOTInductor may compile.
    """
    others = torch.compiler.is_exporting() or inductor_config.cpp_wrapper or inductor_config.fx_wrapper
    return config.streams and not others


__all__ = ["handles_streams"]
