"""Stand-ins for the CUDA driver, as shared libraries over which the C module is built."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from torch_overlay import csrc


if TYPE_CHECKING:
    from pathlib import Path


SYMBOLS = re.findall(r'F\(\w+, "(\w+)"', (csrc.FOLDER / "driver_api.h").read_text())


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
