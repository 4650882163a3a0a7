"""Store the binary of a Triton kernel that a C++ wrapper launches for the first time, also where an earlier one ran it.

A C++ wrapper has its kernels run once by `CachingAutotuner`, which stores the binary under the kernel's name, and loads
what it finds there. Kernels of equal code are one object in a process. When it runs for the second wrapper, it takes
its fast path, which stores nothing: the wrapper loads the binary of the last kernel that had the name, with other code
or other parameters.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


def run_triton_kernel_with_autotune(
    original: Callable[..., Any], pending_kernels: dict[str, Any], kernel_name: str, *args: Any
) -> Any:
    from torch._inductor.codecache import CodeCacheFuture

    kernel: Any = pending_kernels.get(kernel_name)
    if isinstance(kernel, CodeCacheFuture):
        kernel = pending_kernels[kernel_name] = kernel.result()
    if kernel is not None:
        kernel._cached_launcher = None
    return original(pending_kernels, kernel_name, *args)
