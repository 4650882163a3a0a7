"""Relaunched CUDA graphs as a policy of Inductor's, for programs that take nothing else of the overlay.

    import torch
    import torch_overlay.cudagraphs  # with TORCH_OVERLAY_DISABLE=1 in the environment: no hook is installed

    torch._inductor.config.cudagraph_policy = torch_overlay.cudagraphs.RelaunchPolicy()

From then on, code that asks for CUDA graphs (`mode="reduce-overhead"`, `triton.cudagraphs`) gets ours. The options
`cudagraph_*` of `torch_overlay.config` hold, but for those that decide how code is compiled: `cudagraph_rewrites`, and
`cudagraphs`, for whoever sets a policy has chosen. Raises an OverlayError on another release of PyTorch.

With the overlay enabled there is no need for it: the overlay uses the same policy, and also does what no policy can.
Note [What a policy can't do] of `_inductor.relaunch.policy` says what that is.
"""

from __future__ import annotations

import dataclasses

from torch_overlay._inductor.relaunch.causes import CAUSES
from torch_overlay._inductor.relaunch.policy import RelaunchPolicy, SPLIT_ATTENTION


try:
    from torch_overlay._engine.verify import check_version, torch_root
    from torch_overlay.seam_table import SEAMS
except ModuleNotFoundError:  # in the patched form it is a part of the release
    pass
else:
    check_version(torch_root(), SEAMS)

CAUSES["policy-alone"] = dataclasses.replace(CAUSES["policy-alone"], remedy=f"enable the overlay; {SPLIT_ATTENTION}")

__all__ = ["RelaunchPolicy"]
