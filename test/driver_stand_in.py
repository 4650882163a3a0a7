"""Stand-ins for the CUDA driver, as shared libraries over which the C module is built."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

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


def build_module(source: str, folder: str, **parts: str) -> tuple[Any, ctypes.CDLL]:
    """Compile such a library and the C module over it, in the folder. `parts`: C texts of a test's own that become
    parts of the module. Return the module, and the library as a test calls it."""
    library = build(source, Path(folder) / "libdriver.so", "-lpthread")
    sources = csrc.FOLDER
    if parts:
        sources = Path(shutil.copytree(sources, Path(folder) / "csrc"))
    for name, text in parts.items():
        sources.joinpath(f"{name}.c").write_text(text)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder), mock.patch.object(csrc, "FOLDER", sources):
        return csrc.build(library), ctypes.CDLL(library)
