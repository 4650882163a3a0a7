"""Installs seams in modules that are imported later.

`import torch_overlay` must not import the scheduler, the code generators or AOTAutograd: that takes a second, and a
program may never compile anything. The finder below stands first in sys.meta_path. For a module that has seams it
asks the other finders for the module's spec and lets the spec's own loader do the work; right after the module's code
has run, and before anybody else sees the module, the seams are installed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class LateImportFinder:
    """A meta path finder that calls `loaded(module)` after the import of each of `names`."""

    def __init__(self, names: Collection[str], loaded: Callable[[ModuleType], None]) -> None:
        self.names = frozenset(names)
        self.loaded = loaded
        # Modules whose import will end in a call of `loaded`, because this finder has found them.
        self.found: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self.notify_after(spec)
                return spec
        return None

    def notify_after(self, spec: ModuleSpec) -> None:
        """Makes the spec's loader call us once. The loader stays the genuine one: its class, and what it answers
        to inspect.getsource, are upstream's."""
        loader = spec.loader
        if loader is None:
            return
        genuine = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            genuine(module)
            self.loaded(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        self.found.add(spec.name)

    def will_report(self, name: str) -> bool:
        return name in self.found


def is_importing(module: ModuleType | None) -> bool:
    """Is the module's code still running, in this thread or in another?"""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def forget_after_import(package: str) -> None:
    """Takes a package and its submodules out of sys.modules again, at the next import of anything else.

    With TORCH_LOGS="torch_overlay" torch imports the package while torch itself is half imported; nothing can be
    installed then, and nothing should be, since the program may never ask for it. If it does, it imports afresh.
    """

    class Forget:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            if fullname.partition(".")[0] == package or is_importing(sys.modules.get(package)):
                return
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]

    sys.meta_path.insert(0, Forget())  # type: ignore[arg-type]
