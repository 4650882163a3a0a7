"""Keeps Dynamo from tracing our own frames: hooks and their callees also run between a program's compiled graphs.

Dynamo compares a code object's file name, as text, with names of folders. That file name is the one by which the module
was imported, and a folder has as many names as symbolic links lead to it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def folder_names(package: str) -> list[str]:
    """Return the names of a package's folder: those in the package's path, their real paths, and the names by which an
    import through another entry of sys.path would find it.
    """
    own = list(sys.modules[package].__path__)
    others = (os.path.join(entry, *package.split(".")) for entry in sys.path)
    names = [*own, *(name for name in others if _is_one_of(name, own))]
    names += map(os.path.realpath, list(names))
    return list(dict.fromkeys(os.path.abspath(name).replace(os.sep, "/") + "/" for name in names))


def _is_one_of(name: str, folders: list[str]) -> bool:
    try:
        return any(os.path.samefile(name, folder) for folder in folders)
    except OSError:
        return False


def register(trace_rules: ModuleType) -> Callable[[], None]:
    """Add this package to the folders that Dynamo skips."""
    names = folder_names(__name__.rpartition(".")[0])
    trace_rules.SKIP_DIRS.extend(names)
    trace_rules._recompile_re()

    def undo() -> None:
        for name in names:
            trace_rules.SKIP_DIRS.remove(name)
        trace_rules._recompile_re()

    return undo
