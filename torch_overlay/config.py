"""Defines the overlay's options, in PyTorch's own configuration system.

    torch_overlay.config.streams = False
    with torch_overlay.config.patch(streams=False): ...

An option is read when a function is compiled; code that is already compiled doesn't change. As everywhere in PyTorch's
configuration, an assignment holds in the thread that makes it, and an environment variable changes the default: that of
`streams` is TORCH_OVERLAY_STREAMS, and so on. Setting a value that the option doesn't take is an error (`_options`).
"""

import sys
from typing import Any, TYPE_CHECKING

from torch.utils._config_module import install_config_module

from torch_overlay import _options


# User streams and events go through the compiler. False restores upstream's handling of them, which code for
# FX wrappers has in any case, and what torch.export traces.
streams: bool = True

# Ranges and marks of torch.cuda.nvtx, and ranges of torch.profiler.record_function, in programs with streams. True:
# compiled code keeps them, in the program's order with the launches; kernels are not fused across their ends, and a
# captured CUDA graph is split there. False: compiled code leaves them out. None: compiled code keeps them if a tool is
# attached to the process (Nsight Systems) or a profiler runs when the function is compiled. With True, profiles also
# show ranges of the overlay's own, around calls of compiled code, launches of CUDA graphs and blocks on side streams,
# and annotations of kernels in graphs, with the user's line and module.
nvtx: bool | None = None

# A branch on a side stream that consists of pointwise work and takes less device time than this, in microseconds,
# costs more to launch than it can gain: it runs on the caller's stream, fused with the kernels there. A region in which
# every kernel takes less than this runs on the caller's stream alone in each call that finds the device idle. 0 keeps
# every branch on its stream.
fold_branches_below_us: float = 5.0

# Offload saved activations to pinned host memory until the backward, as many as it takes to keep within a budget the
# memory that a forward and its backward hold on the device at their peak (saved activations, temporaries, results,
# gradients; not their inputs). None: off. {"budget_gb": 12.5}: that many gigabytes (10^9 bytes), or an error that says
# what would fit; with "strict": False a warning, and no offload. "auto": the device memory that is free when the
# function is compiled. To cut a process's peak P, of which B is held between steps, by 40 %: 0.6 P - B. The environment
# variable takes "auto" or a number of gigabytes.
activation_offload: Any = None

# How compiled code that asks for CUDA graphs (`mode="reduce-overhead"`, `triton.cudagraphs`) gets them: "relaunch", one
# graph for a region, whose pointers are patched for each call; "trees", PyTorch's own; "off", none.
cudagraphs: str = "relaunch"

# A region keeps up to this many graphs for different sizes; the least recently used graph is dropped.
cudagraph_templates: int = 64

# Every relaunch is compared with the compiled code, run on copies of the inputs. Slow; for tests and bug reports.
cudagraph_verify: bool = False

# In inference, neighbours in a graph that are known to be independent run side by side, if the device has room.
cudagraph_concurrency: bool = True

# Code that asks for CUDA graphs is rewritten where it goes through host memory and no program can tell the difference:
# small tensors in host memory that it only reads on the device are kept there, and copied again when they change.
cudagraph_rewrites: bool = True

# These options decide how compiled code is run, not the code itself, so caches share the code between their values.
# Three of them also decide about code that asks for CUDA graphs: `_inductor.cache_key` adds these to its key.
_cache_config_ignore_prefix = ["cudagraph"]


if TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403


install_config_module(sys.modules[__name__])
_options.install(sys.modules[__name__])
