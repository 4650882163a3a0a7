"""Say whose memory the results of CUDA graphs are. Code with streams is generated for that."""

from __future__ import annotations

from torch_overlay import config


def results_are_in_pool() -> bool:
    """True if graphs keep their results in a memory pool of their own, whose blocks nobody else gets."""
    return config.cudagraphs == "trees"


def results_are_callers() -> bool:
    """True if graphs allocate their results on their caller's current stream, as code without a graph does."""
    return config.cudagraphs == "relaunch"
