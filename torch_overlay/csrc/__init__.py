"""Builds the C module: events and region boundaries, relaunches of CUDA graphs, and the reading of captured graphs.

    driver_api.c      the driver's functions, as one table         driver_api.h
    events.c          `events`: Event (`_inductor.streams.runtime`)   events.h
    region.c          and Region, the boundary of generated code
    aliased_memory.c  `relaunch`: memory for captures              relaunch.h, for all of `relaunch`
    data_ptr.c        addresses of tensors (`launch.data_ptrs`)
    numbers.c         parameters that are computed from numbers (`numbers.expressions`)
    patch.c           the parameters of an executable's nodes (`launch.native`)
    scratch.c         scratch memory and its cache
    call.c            a relaunch as one call (`launch.native_call`)
    graph_reader.c    `graph`: nodes and edges (`graph.native_read`)
    module.c          the extension module, which has `events`, `relaunch` and `graph` in it

The module is built at first use by the compiler that Triton needs, and Triton caches it. The environment variable
TORCH_OVERLAY_CFLAGS adds flags, such as those of a sanitizer.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parent
MAIN = "module.c"
PARTS = ("driver_api.c", "events.c", "region.c", "aliased_memory.c", "data_ptr.c", "numbers.c")
PARTS += ("patch.c", "scratch.c", "call.c", "graph_reader.c")
HEADERS = ("driver_api.h", "events.h", "relaunch.h")
DRIVER = "libcuda.so.1"
FLAGS = ("-std=gnu11", "-fvisibility=hidden")


def arguments(driver: str = DRIVER) -> dict[str, Any]:
    """Return the arguments for Triton's compiler, which caches a build by the first file's text and these flags."""
    digest = hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in (*PARTS, *HEADERS))).hexdigest()
    flags = [
        *FLAGS,
        *os.environ.get("TORCH_OVERLAY_CFLAGS", "").split(),
        f'-DDRIVER="{driver}"',
        f"-DSOURCES=0x{digest[:16]}",
    ]
    return {
        "src_path": str(FOLDER / MAIN),
        "name": "torch_overlay_c",
        "ccflags": [*flags, *(str(FOLDER / name) for name in PARTS)],
    }


def build(driver: str = DRIVER) -> Any:
    """Build and return the extension module for a driver library. Raises what the compiler or the loader raises."""
    from triton.runtime.build import compile_module_from_file

    return compile_module_from_file(**arguments(driver))


class NotBuiltError(RuntimeError):
    """The extension module can't be built or loaded on this host."""


@functools.cache
def _attempt() -> Any:
    """Return the extension module, or the error that says why there is none."""
    try:
        return build()
    except Exception as error:
        return NotBuiltError(
            f"torch_overlay's C module can't be built: {error}. It takes what Triton takes: a C compiler (gcc, clang, "
            f"or the one that CC names), Python's headers, and {DRIVER}, which comes with NVIDIA's driver"
        )


def extension() -> Any:
    """Return the extension module, one a process. Raises `NotBuiltError`; a failed build isn't tried again."""
    found = _attempt()
    if isinstance(found, NotBuiltError):
        raise found
    return found
