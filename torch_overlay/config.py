"""Options of the overlay, in PyTorch's own configuration system.

    torch_overlay.config.streams = False
    with torch_overlay.config.patch(streams=False): ...

An option is read when a function is compiled; what is compiled already stays as it is. As everywhere in PyTorch's
configuration, an assignment holds in the thread that makes it, and an environment variable changes the default: that of
`streams` is TORCH_OVERLAY_STREAMS, and so on. What an option doesn't take is an error where it is set (`_options`).
"""

import sys
from typing import Any, TYPE_CHECKING

from torch.utils._config_module import install_config_module

from torch_overlay import _options


# User streams and events go through the compiler. False gives upstream's handling of them back.
streams: bool = True

# Ranges and marks of torch.cuda.nvtx, and ranges of torch.profiler.record_function, in programs with streams. True:
# they stay in compiled code, where the program has them among the launches; kernels are not fused across their ends,
# and a captured CUDA graph is split there. False: they are left out. None: they stay where a tool is attached to the
# process (Nsight Systems) or a profiler runs when the function is compiled.
nvtx: bool | None = None

# A branch on a side stream that consists of pointwise work and takes less device time than this, in microseconds,
# costs more to launch than it can gain: it runs on the caller's stream, fused with what stands there. A region in which
# every kernel takes less than this keeps to the caller's stream in each call that finds the device idle. 0 keeps every
# branch where the user put it.
fold_branches_below_us: float = 5.0

# Saved activations wait for the backward in pinned host memory, as many as it takes to keep what a forward and its
# backward hold on the device at their peak (saved activations, temporaries, results, gradients; not their inputs)
# within a budget. None: off. {"budget_gb": 12.5}: that many gigabytes (10^9 bytes), or an error that says what would
# fit; with "strict": False a warning, and no offload. "auto": what the device has free when the function is compiled.
# To cut a process's peak P, of which B is held between steps, by 40 %: 0.6 P - B. The environment variable takes "auto"
# or a number of gigabytes.
activation_offload: Any = None

# How compiled code that asks for CUDA graphs (`mode="reduce-overhead"`, `triton.cudagraphs`) gets them: "relaunch", one
# graph for a region that is pointed at other memory for each call; "trees", PyTorch's own; "off", none.
cudagraphs: str = "relaunch"

# A region keeps as many graphs for different sizes; the one that was used least recently goes.
cudagraph_templates: int = 64

# Every relaunch is compared with the compiled code, run on copies of the inputs. Slow; for tests and bug reports.
cudagraph_verify: bool = False

# In inference, neighbours in a graph that are known to be independent run side by side, where the device has room.
cudagraph_concurrency: bool = True

# Inference graphs leave this much scratch memory allocated on a device between their launches, in MiB, for each other,
# since to allocate it is a good part of what a launch takes the host. 0: all is freed at once.
cudagraph_scratch_cache_mib: float = 64

# These decide what is done with compiled code, and nothing about the code: caches serve it to either choice. Two decide
# about code that asks for CUDA graphs, too: `_inductor.cache_key` adds them for that.
_cache_config_ignore_prefix = ["cudagraph"]


if TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403


install_config_module(sys.modules[__name__])
_options.install(sys.modules[__name__])
