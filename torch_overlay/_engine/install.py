"""Installs all seams or none, and removes them without a trace.

Lifecycle:

    off         import torch_overlay: the release, the files, and the fingerprint of every seam are verified on disk
                (verify.py); the early seams, around constructors of torch._guards, are installed
    waiting     the first compilation begins, or the program calls enable(): all modules that have seams are imported,
                their targets are verified in memory, the hooks are built, and all of them are installed
    installed   disable(): the changes are undone in reverse, after checking that nobody has put anything around a hook
    off

An error in one of these steps leaves no hook behind, and the overlay is off.

Note [One moment]
Everything that Dynamo, torch.export, AOTInductor and compile_fx do, and the loading of what they have saved, begins
with the construction of a CompileContext or a TracingContext, while no function with a seam is on the stack that would
have to be a hook already. torch itself has loaded both classes. The end of the import of torch._dynamo is a worse
moment: a hundred modules of torch import it in the middle of their own import, where not all modules with seams can be
imported, an import hook of another library can load it past ours, and many programs import it and compile nothing.
The price is that a library may replace a function in memory between the import of torch_overlay and the first
compilation, which is then an OverlayError; enable() after the import installs the hooks before that library comes. And
functorch.compile makes none of the contexts: alone, it is stock.

Invariants:

    1. The first original wins: a hook wraps what the owner's __dict__ held when the seams were installed.
    2. Nothing is imported while our lock is held: another thread that holds the module's import lock may be waiting for
       our lock.
    3. A compilation has all seams or none: in the middle of one, none is installed.
    4. A compilation that finds a hook taken out (upstream's object is back in its place, or its module was loaded
       again) disables the overlay, and ends with an error.

A new attribute of a function's owner does not reach the modules that imported the function by name. They are found by
identity in the namespaces of all loaded modules, and so are the keys of Dynamo's rules. An object that stored an
original when its module was loaded would keep it: test/test_seams.py asks the garbage collector for every referrer of
every original, and fails if there is one.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Literal, TYPE_CHECKING

from torch_overlay.errors import OverlayError
from torch_overlay.hooks import registered_by, resolve, wrapped_by

from . import verify


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    from torch_overlay.seams import Seam


log = logging.getLogger("torch_overlay")


@dataclass
class Change:
    """An installed seam, and the data that its removal needs."""

    seam: Seam
    spec: Any  # that its module was loaded by: a module that is loaded again has another one
    place: verify.SeamTarget | None = None
    hook: Any = None  # with the descriptor of the original
    undo: Callable[[], None] | None = None

    def is_loaded_again(self) -> bool:
        module = sys.modules.get(self.seam.module)
        return module is not None and module.__spec__ is not self.spec

    def is_upstreams(self, found: Any) -> bool:
        """True if an object is the original, or the function that upstream's code defines, and not the hook."""
        if self.place is None or found is self.hook:
            return False
        function = verify.unwrap_descriptor(found)
        if function is self.place.original:
            return True
        module = sys.modules.get(self.seam.module)
        return module is not None and verify.is_upstreams_own(function, self.seam.qualname, module)

    def is_taken_out(self) -> bool:
        return self.is_loaded_again() or (self.place is not None and self.is_upstreams(self.place.current()))


class Installer:
    """State of the overlay in this process."""

    def __init__(self, seams: Callable[[], Sequence[Seam]]) -> None:
        self.get_seams = seams
        self.lock = threading.RLock()
        self.state: Literal["off", "waiting", "installed"] = "off"
        self.changes: dict[str, Change] = {}
        self.edited_files: list[str] = []
        self.off_because = "enable() has not been called"
        # A child must not be forked in the middle of an installation, nor get a lock that none of its threads holds.
        os.register_at_fork(
            before=lambda: self.lock.acquire(),
            after_in_parent=lambda: self.lock.release(),
            after_in_child=lambda: setattr(self, "lock", threading.RLock()),
        )

    @property
    def enabled(self) -> bool:
        return self.state != "off"

    def wait_for_compilation(self) -> None:
        """Verify the files; have the first compilation install every seam. Does nothing if the overlay is enabled."""
        if self.enabled:
            return
        try:
            root = verify.torch_root()
            import torch  # noqa: F401

            seams = self.get_seams()
            verify.check_version(root, seams)
            import torch_overlay.config  # noqa: F401  (refuses bad values of options in the environment)

            edited = verify.check_files(root, seams)
            self._install([seam for seam in seams if seam.early], "off", "waiting")
        except BaseException as error:
            self.off_because = f"enable() failed: {error}"
            raise
        self.edited_files = edited
        self._say_what_is_compiled("was enabled", "keeps upstream's behaviour")

    def enable(self) -> None:
        """Install every seam, or none. Does nothing if they are installed."""
        self.wait_for_compilation()
        if self.state == "waiting":
            self._install_or_disable()

    def before_compilation(self) -> None:
        """Install every seam, if no other compilation is under way. Disable the overlay and raise an error if one of
        its hooks has been taken out.
        """
        from torch._guards import CompileContext, TracingContext

        if self.state == "waiting" and CompileContext.try_get() is None and TracingContext.try_get() is None:
            self._install_or_disable()
        elif taken := self.taken_out():
            error = taken_out(taken)
            self.disable(because=str(error))
            raise error

    def taken_out(self) -> list[str]:
        """Return targets whose module was loaded again, or at which somebody has put upstream's object back."""
        return [change.seam.target for change in list(self.changes.values()) if change.is_taken_out()]

    def disable(self, because: str = "disable() was called") -> None:
        """Remove every seam. Does nothing if the overlay is not enabled."""
        with self.lock:
            if not self.enabled:
                return
            changes = list(self.changes.values())
            for change in changes:
                check_in_place(change)
            self._remove(changes)
            self.state, self.off_because = "off", because
        self._say_what_is_compiled("was disabled", "keeps the overlay's behaviour")

    def _install_or_disable(self) -> None:
        try:
            self._install([seam for seam in self.get_seams() if not seam.early], "waiting", "installed")
        except Exception as error:
            self.disable(because=f"the seams could not be installed: {error}")
            raise

    def _install(
        self, seams: Sequence[Seam], before: Literal["off", "waiting"], after: Literal["waiting", "installed"]
    ) -> None:
        """Install seams and change the state; do nothing if another thread has changed it meanwhile."""
        modules = dict.fromkeys(seam.module for seam in seams)
        for name in modules:
            import_module(name)
        for seam in seams:
            if seam.kind == "register":
                resolve(seam.impl)
        with self.lock:
            if self.state == before:
                for name in modules:
                    verify.check_origin(sys.modules[name])
                self._change(seams)
                self.state = after

    def _change(self, seams: Sequence[Seam]) -> None:
        changes = [prepare(hook) for seam in seams for hook in seam.hooks]
        try:
            for change in changes:
                if change.place is not None:
                    setattr(change.place.owner, change.place.name, change.hook)
            rebind((c.place.original, verify.unwrap_descriptor(c.hook), c.seam) for c in changes if c.place is not None)
            for change in changes:
                if change.place is None:
                    change.undo = register(change.seam)
        except BaseException:
            self._remove(changes)
            raise
        self.changes.update({change.seam.target: change for change in changes})

    def _remove(self, changes: Sequence[Change]) -> None:
        for change in reversed(changes):
            self.changes.pop(change.seam.target, None)
            if change.is_loaded_again():
                continue  # the objects that we have changed are gone
            if change.undo is not None:
                change.undo()
            if change.place is not None:
                setattr(change.place.owner, change.place.name, change.place.raw)
        rebind((verify.unwrap_descriptor(c.hook), c.place.original, c.seam) for c in changes if c.place is not None)

    def _say_what_is_compiled(self, event: str, effect: str) -> None:
        convert_frame = sys.modules.get("torch._dynamo.convert_frame")
        frames = getattr(convert_frame, "FRAME_COUNTER", 0)
        if frames:
            log.warning(
                "torch_overlay %s after torch.compile had compiled %d frame(s) in this process: that code %s until "
                "torch._dynamo.reset() is called; frames compiled from now on are not affected.",
                event,
                frames,
                effect,
            )


def import_module(name: str) -> None:
    """Import a module that has seams; wait for another thread that is importing it."""
    failure: Exception | None = None
    try:
        importlib.import_module(name)
    except Exception as error:
        failure = error
    if is_importing(sys.modules.get(name)):
        raise OverlayError(
            "torch_is_importing",
            name,
            "a module that is loaded or not loaded",
            "one whose import is under way, further up the call stack or in a thread that waits for this one",
            "Compile, or call torch_overlay.enable(), outside of modules that torch itself imports.",
        ) from failure
    if failure is not None:
        remedy = "Reinstall PyTorch, or leave out the library that prevents the import."
        raise OverlayError("import_failed", name, "a module of PyTorch", repr(failure), remedy) from failure


def prepare(seam: Seam) -> Change:
    """Verify a seam in memory and build its hook; change nothing."""
    module = sys.modules[seam.module]
    if seam.kind == "register":
        return Change(seam, module.__spec__)
    place = verify.find_place(seam, module)
    hook = wrapped_by(seam.impl)(place.original)
    return Change(seam, module.__spec__, place, verify.rewrap_descriptor(place.raw, hook))


def register(seam: Seam) -> Callable[[], None]:
    undo = registered_by(seam.impl, seam.module)
    if not callable(undo):
        raise OverlayError(
            "bad_registration", seam.target, f"{seam.impl} returns a callable", repr(undo), "Report this."
        )
    return undo


def check_in_place(change: Change) -> None:
    """Check that nobody has put something around a hook, or in its place."""
    place = change.place
    if place is None or change.is_loaded_again():
        return
    current = place.current()
    if current is not change.hook and not change.is_upstreams(current):
        raise OverlayError(
            "wrapped_over",
            change.seam.target,
            "the hook that enable() put there",
            repr(current),
            "Take out the other library's change first, then call torch_overlay.disable() again.",
        )


def taken_out(targets: Iterable[str]) -> OverlayError:
    return OverlayError(
        "taken_out",
        ", ".join(targets),
        "the hook that enable() put there",
        "upstream's own object",
        "Call torch_overlay.enable() before the library that puts back what it has saved is imported, or after it has "
        "done so; don't load modules of torch again. After torch_overlay.enable() and torch._dynamo.reset() everything "
        "is compiled with it.",
    )


def rebind(triples: Iterable[tuple[Any, Any, Seam]]) -> None:
    """Replace each object by its successor in the namespaces of loaded modules; `triples` are (old, successor, seam).

    In torch's own modules and in ours, the object is replaced under every name. In other modules it is replaced only
    under its own name, by which it was imported; a variable of another name is the program's own, and keeps the old
    object.
    """
    successors = {id(old): (old, new, seam) for old, new, seam in triples}
    if not successors:
        return
    own = {seam.module.partition(".")[0] for _, _, seam in successors.values()} | {__name__.partition(".")[0]}
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        # The test on the whole namespace runs in C: it takes a few milliseconds for a few thousand modules.
        if not isinstance(namespace, dict) or successors.keys().isdisjoint(map(id, list(namespace.values()))):
            continue
        is_own = module_name.partition(".")[0] in own
        for name, value in list(namespace.items()):
            if id(value) in successors:
                _, new, seam = successors[id(value)]
                if is_own or name == seam.qualname.rpartition(".")[2]:
                    namespace[name] = new
    _rebind_for_dynamo([(old, new) for old, new, _ in successors.values()])


def _rebind_for_dynamo(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Replace functions among the keys of Dynamo's rules for torch's functions. Dynamo makes this table when it first
    asks, and a program may have changed it since."""
    rules = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    if rules is None or not rules.cache_info().currsize:
        return
    table = rules()
    for old, new in pairs:
        if old in table:
            table[new] = table.pop(old)


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
