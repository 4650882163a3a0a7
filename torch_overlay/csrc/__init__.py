"""Builds the extension module of the C sources in this folder, which call the CUDA driver.

Each source says what it is, and adds its functions and types to the module by itself (`module.h`): a source that lies
here is a part of the module.

The module is built at first use by the compiler that Triton needs, and Triton caches it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parent
NAME, MAIN = "cuda_driver_c", "module.c"
DRIVER = "libcuda.so.1"
FLAGS = ("-std=gnu11", "-fvisibility=hidden")
SECONDS = 300  # for the compiler, which takes some


def arguments(driver: str = DRIVER) -> dict[str, Any]:
    """Return the arguments for Triton's compiler, which caches a build by the first file's text and these flags."""
    others = sorted(path for path in FOLDER.glob("*.[ch]") if path.name != MAIN)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in others)).hexdigest()
    flags = [*FLAGS, f'-DDRIVER="{driver}"', f"-DSOURCES=0x{digest[:16]}"]
    flags += [str(path) for path in others if path.suffix == ".c"]
    return {"src_path": str(FOLDER / MAIN), "name": NAME, "ccflags": flags}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed. `function`: its name, or the name of a method that made several calls; `code`:
    the CUresult; `where`: the graph's node, if there is one."""

    def __init__(self, function: str, code: int, text: str, where: str = "") -> None:
        super().__init__(f"CUDA driver error in {function}: {text} ({code})" + (f", at {where}" if where else ""))
        self.function, self.code, self.where = function, code, where


def build(driver: str = DRIVER) -> Any:
    """Build and return the extension module for a driver library. Raises what the compiler or the loader raises."""
    from triton.runtime import build as of_triton

    before, of_triton.subprocess = of_triton.subprocess, _Limited  # type: ignore[assignment]
    try:
        module = of_triton.compile_module_from_file(**arguments(driver))
    finally:
        of_triton.subprocess = before
    vars(module)["DriverError"] = DriverError  # the class of what `driver_api.c` raises
    return module


class _Limited:
    """What Triton's build takes from the module `subprocess`: a compiler that hangs is killed, with its children."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def check_call(command: list[str], **options: Any) -> None:
        with subprocess.Popen(command, start_new_session=True, **options) as process:
            try:
                if code := process.wait(SECONDS):
                    raise subprocess.CalledProcessError(code, command)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the compiler {command[0]} has not ended in {SECONDS} s") from None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)


class NotBuiltError(RuntimeError):
    """The extension module can't be built or loaded on this host."""


@functools.cache
def _attempt() -> Any:
    """Return the extension module, or the error that says why there is none."""
    try:
        return build()
    except Exception as error:
        return NotBuiltError(
            f"the C module over the CUDA driver can't be built: {error}. It takes what Triton takes: a C compiler "
            f"(gcc, clang, or the one that CC names), Python's headers, and {DRIVER}, which comes with NVIDIA's driver"
        )


def extension() -> Any:
    """Return the extension module, one a process. Raises `NotBuiltError`; a failed build isn't tried again."""
    found = _attempt()
    if isinstance(found, NotBuiltError):
        raise NotBuiltError(*found.args)  # one error for all would keep the frames of every caller
    return found
