"""Stand-ins for the CUDA driver, as shared libraries over which the C module is built."""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch.utils._filelock import FileLock
from torch.utils._triton import has_triton_package

from torch_overlay import csrc


SYMBOLS = re.findall(r'"(cu\w+)"', (csrc.FOLDER / "driver_api.h").read_text())


def build(source: str, library: Path, *flags: str) -> str:
    """Compile a library of the driver's functions; those that the C text doesn't define return an error. Its path."""
    from triton.runtime.build import _find_compiler

    missing = [name for name in SYMBOLS if not re.search(rf"\b{name}\(", source)]
    text = "\n".join([source, *(f"int {name}(void) {{ return 801; }}" for name in missing)])
    path = library.with_suffix(".c")
    path.write_text(text)
    command = [_find_compiler("c"), "-O1", "-g", "-shared", "-fPIC", str(path), "-o", str(library), *flags]
    subprocess.run(command, check=True)
    return str(library)


@functools.cache
def builds() -> Path:
    """The folder of what is compiled: that of the run of tests (`conftest.py`), else one of this process."""
    if given := os.environ.get("OVERLAY_TEST_BUILDS"):
        return Path(given)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def made_once(name: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of a build, and whether it is to be made; other processes wait meanwhile."""
    folder = builds() / name
    with FileLock(f"{folder}.lock"):
        try:
            yield folder, not folder.exists()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _objects() -> list[str]:
    """Compile the sources that are the same over each driver. Return their paths."""
    from triton.runtime.build import _find_compiler

    sources = [str(path) for path in csrc.FOLDER.glob("*.c") if path.name not in (csrc.MAIN, "driver_api.c")]
    with made_once("objects") as (folder, is_new):
        if is_new:
            folder.mkdir()
            command = [_find_compiler("c"), *csrc.FLAGS, "-O3", "-fPIC", "-c", f"-I{sysconfig.get_paths()['include']}"]
            subprocess.run([*command, *sources], check=True, cwd=folder)
    return [f"{folder}/{Path(source).stem}.o" for source in sources]


def build_module(source: str, **parts: str) -> tuple[Any, ctypes.CDLL]:
    """Compile such a library and the C module over it, once for all processes of a run. `parts`: C texts of a test's
    own that become parts of the module. Return the module, and the library as a test calls it."""
    flags = (*csrc.FLAGS, *_objects())
    with made_once(hashlib.sha256(repr((source, parts)).encode()).hexdigest()[:16]) as (folder, is_new):
        library, sources = folder / "libdriver.so", folder / "csrc"
        if is_new:
            sources.mkdir(parents=True)
            build(source, library, "-lpthread")
            for path in (*csrc.FOLDER.glob("*.h"), csrc.FOLDER / csrc.MAIN, csrc.FOLDER / "driver_api.c"):
                shutil.copy(path, sources)
            for name, text in parts.items():
                sources.joinpath(f"{name}.c").write_text(text)
        cache = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder))
        with cache, mock.patch.multiple(csrc, FOLDER=sources, FLAGS=flags):
            return csrc.build(str(library)), ctypes.CDLL(str(library))


needs_compiler = unittest.skipUnless(has_triton_package(), "Triton builds the module")
needs_failing_allocations = unittest.skipUnless(importlib.util.find_spec("_testcapi"), "lets allocations fail")


def fail_each_allocation(call: Callable[[], object]) -> None:
    """Make a call in which one allocation fails, for each of the first: any error but Python's own is the caller's."""
    import _testcapi

    for allocation in range(1, 40):
        _testcapi.set_nomemory(allocation, allocation + 1)
        try:
            call()
        except MemoryError:
            pass
        finally:
            _testcapi.remove_mem_hooks()
