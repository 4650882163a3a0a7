"""Installs seams in modules that are imported later.

`import torch_overlay` must not import the scheduler, the code generators or AOTAutograd: that takes a second, and a
program may never compile anything. The finder below is the first in sys.meta_path. For a module that has seams it asks
the other finders for the module's spec and lets the spec's own loader do the work; right after the module's code has
run, and before other code sees the module, the seams are installed.

Other libraries watch imports, too. They put finders before ours, ask all finders again from within their own, wrap
loaders, or load a module themselves. Whoever asks, the finder reports each execution of the code of a module that
it has found, once. A module that was loaded without the finder is noticed before the next compilation
(`compile_context_init`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class LateImportFinder:
    """A meta path finder that calls `loaded(module)` after the import of each of `names`."""

    def __init__(self, names: Collection[str], loaded: Callable[[ModuleType], None]) -> None:
        self.names = frozenset(names)
        self.loaded = loaded
        # Modules that this finder has found and whose code is running; it will end in a call of `loaded`.
        self.running: set[str] = set()
        self._asking = threading.local()

    def stand_first(self) -> None:
        """Move this finder to the front of sys.meta_path. The others keep their order, in one step: a thread that walks
        the list meanwhile skips none of them.
        """
        if not sys.meta_path or sys.meta_path[0] is not self:
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]  # type: ignore[list-item]

    def leave(self) -> None:
        with contextlib.suppress(ValueError):  # another library has replaced the list
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asking = self._asking.__dict__.setdefault("names", set())
        if fullname not in self.names or fullname in asking:
            return None  # a finder that we ask is asking again; we report the module when it returns a spec
        asking.add(fullname)
        try:
            for finder in list(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    self.notify_after(spec)
                    return spec
            return None
        finally:
            asking.discard(fullname)

    def notify_after(self, spec: ModuleSpec) -> None:
        """Make the spec's loader call us once. The loader remains the genuine one: its class, and its answers to
        inspect.getsource, are upstream's.
        """
        loader: Any = spec.loader
        genuine = getattr(loader, "exec_module", None)
        own = getattr(loader, "__dict__", None)
        if genuine is None or own is None or isinstance(loader, type):
            return  # a loader that takes no attributes, or that all modules share
        if getattr(genuine, "reports_to", None) is self:
            return  # found before, and not used since
        before = {name: value for name, value in own.items() if name == "exec_module"}

        def exec_module(module: ModuleType) -> None:
            del own["exec_module"]
            own.update(before)
            self.running.add(spec.name)
            try:
                genuine(module)
                self.loaded(module)
            finally:
                self.running.discard(spec.name)

        exec_module.reports_to = self  # type: ignore[attr-defined]
        own["exec_module"] = exec_module

    def will_report(self, name: str) -> bool:
        return name in self.running


def before_compilation(is_inner: bool) -> None:
    """Do nothing; the package replaces this function by its installer's method."""


def compile_context_init(original: Callable[..., None], self: Any, *args: Any) -> None:
    """Wrap torch._guards.CompileContext.__init__, with which every compilation begins. Torch itself loads this seam."""
    before_compilation(is_inner=type(self).try_get() is not None)
    original(self, *args)


def is_running_here(module: ModuleType) -> bool:
    """True if the module's code is running further up this thread's call stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(module) and frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


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
