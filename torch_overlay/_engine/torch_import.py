"""Says which modules are being imported, and survives being imported by torch while torch itself is half imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from types import ModuleType


def is_importing(module: ModuleType | None) -> bool:
    """True if the module's code is still running, in this thread or in another."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def forget_after_import(package: str) -> None:
    """Remove a package and its submodules from sys.modules again, at the next import of anything else.

    With TORCH_LOGS="torch_overlay" torch imports the package while torch itself is half imported; nothing can be
    installed then, and nothing should be, since the program may never ask for the package. If it does, it imports the
    package anew.
    """

    class Forget:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            if fullname.partition(".")[0] == package or is_importing(sys.modules.get(package)):
                return
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]

    sys.meta_path.insert(0, Forget())  # type: ignore[arg-type]
