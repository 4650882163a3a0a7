"""Stand-ins for the CUDA driver, as shared libraries over which the C module is built."""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
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


@functools.cache
def _objects() -> tuple[tempfile.TemporaryDirectory[str], list[str]]:
    """Compile, once a process, the sources that are the same over each driver. Return their folder and paths."""
    from triton.runtime.build import _find_compiler

    folder = tempfile.TemporaryDirectory()
    sources = [str(path) for path in csrc.FOLDER.glob("*.c") if path.name not in (csrc.MAIN, "driver_api.c")]
    command = [_find_compiler("c"), *csrc.FLAGS, "-O3", "-fPIC", "-c", f"-I{sysconfig.get_paths()['include']}"]
    subprocess.run([*command, *sources], check=True, cwd=folder.name)
    return folder, [f"{folder.name}/{Path(source).stem}.o" for source in sources]


def build_module(source: str, folder: str, **parts: str) -> tuple[Any, ctypes.CDLL]:
    """Compile such a library and the C module over it, in the folder. `parts`: C texts of a test's own that become
    parts of the module. Return the module, and the library as a test calls it."""
    library = build(source, Path(folder) / "libdriver.so", "-lpthread")
    sources = Path(folder, "csrc")
    sources.mkdir()
    for path in (*csrc.FOLDER.glob("*.h"), csrc.FOLDER / csrc.MAIN, csrc.FOLDER / "driver_api.c"):
        shutil.copy(path, sources)
    for name, text in parts.items():
        sources.joinpath(f"{name}.c").write_text(text)
    flags = (*csrc.FLAGS, *_objects()[1])
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder), mock.patch.multiple(csrc, FOLDER=sources, FLAGS=flags):
        return csrc.build(library), ctypes.CDLL(library)
