"""Installs all seams or none, and removes them without a trace.

Lifecycle, all under one lock:

    enable()   1. verify on disk: release, files, fingerprints of every seam       (verify.py)
               2. verify in memory: targets and holders in modules that are loaded
               3. build the hooks
               4. change: owners first, then those who hold the originals by value, then registrations
    import of a module that has seams: steps 2 to 4 for that module              (late_import.py)
    disable()  the changes in reverse, after checking that every hook is still where it was put

An error in steps 1 to 3 leaves everything as it was; one in step 4 is rolled back. Invariants:

    1. The first original wins: a hook wraps what the owner's __dict__ held when the overlay was enabled.
    2. Nothing of ours is imported while the lock is held: another thread that holds the import lock of such a
       module may be waiting for ours.
    3. Between enable() and disable() a loaded module has all of its seams, or is being imported right now.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

from torch_overlay.errors import OverlayError
from torch_overlay.hooks import registered_by, resolve, wrapped_by

from . import verify
from .holders import check_holder, Holder, rebind
from .late_import import is_importing, LateImportFinder


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    from torch_overlay.seams import Seam

log = logging.getLogger("torch_overlay")


@dataclass
class Change:
    """One seam as installed, and what it takes to remove it."""

    seam: Seam
    place: verify.Place | None = None
    hook: Any = None
    raw_hook: Any = None
    holders: list[Holder] = field(default_factory=list)
    undo: Callable[[], None] | None = None

    @property
    def is_global(self) -> bool:
        """Does the change hold wherever modules imported the object by value? As in the patched form: what replaces
        a name that a module imported from another one holds in that module only."""
        if self.place is None:
            return False
        return self.seam.kind == "wrap" or getattr(self.place.original, "__module__", None) == self.seam.module


class Installer:
    """The state of the overlay in this process."""

    def __init__(self, seams: Callable[[], Sequence[Seam]]) -> None:
        self.get_seams = seams
        self.lock = threading.RLock()
        self.changes: dict[str, Change] = {}
        self.finder: LateImportFinder | None = None
        self.edited_files: list[str] = []
        self.off_because = "enable() has not been called"
        # A child must not be forked in the middle of an installation, nor with a lock that no thread of it holds.
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork_in_parent, after_in_child=self._after_fork
        )

    def _before_fork(self) -> None:
        self.lock.acquire()

    def _after_fork_in_parent(self) -> None:
        self.lock.release()

    def _after_fork(self) -> None:
        self.lock = threading.RLock()

    @property
    def enabled(self) -> bool:
        return self.finder is not None

    def enable(self) -> None:
        """Installs every seam, or none. Does nothing if the overlay is enabled."""
        if self.enabled:
            return
        try:
            self._enable()
        except BaseException as error:
            self.off_because = f"enable() failed: {error}"
            raise
        self._say_what_is_compiled("was enabled", "keeps upstream's behaviour")

    def _enable(self) -> None:
        root = verify.torch_root()
        import torch  # noqa: F401

        verify.check_version(root)
        seams = self.get_seams()
        names = {seam.module for seam in seams}
        edited = verify.check_files(root, seams)
        for seam in seams:
            if seam.kind != "wrap" and seam.module in sys.modules:
                resolve(seam.impl)
        self._wait_for_imports(names)
        with self.lock:
            if self.enabled:
                return
            finder = LateImportFinder(names, self._module_loaded)
            sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
            try:
                loaded = {name for name in names if name in sys.modules and not finder.will_report(name)}
                for name in loaded:
                    if is_importing(sys.modules[name]):
                        raise importing(name)
                self._install([seam for seam in seams if seam.module in loaded])
            except BaseException:
                sys.meta_path.remove(finder)  # type: ignore[arg-type]
                raise
            self.finder = finder
            self.edited_files = edited

    def disable(self, because: str = "disable() was called") -> None:
        """Removes every seam. Does nothing if the overlay is not enabled."""
        with self.lock:
            finder = self.finder
            if finder is None:
                return
            changes = list(self.changes.values())
            for change in changes:
                self._check_in_place(change)
            self._remove(changes)
            sys.meta_path.remove(finder)  # type: ignore[arg-type]
            self.finder = None
            self.off_because = because
        self._say_what_is_compiled("was disabled", "keeps the overlay's behaviour")

    def _wait_for_imports(self, names: Iterable[str]) -> None:
        """Another thread may be in the middle of importing a module that our finder would have had to find."""
        for name in names:
            if is_importing(sys.modules.get(name)):
                importlib.import_module(name)
                if is_importing(sys.modules.get(name)):
                    raise importing(name)

    def _module_loaded(self, module: ModuleType) -> None:
        """A module that has seams was just imported."""
        seams = [seam for seam in self.get_seams() if seam.module == module.__name__]
        for seam in seams:
            if seam.kind != "wrap":
                resolve(seam.impl)
        with self.lock:
            if not self.enabled:
                return
            self._forget(module.__name__)
            try:
                self._install(seams)
            except OverlayError as error:
                self.disable(because=f"{module.__name__} was imported: {error}")
                raise

    def _forget(self, module_name: str) -> None:
        """Drops the changes of a module that is loaded again: the objects they were made to are gone."""
        for target in [target for target, change in self.changes.items() if change.seam.module == module_name]:
            del self.changes[target]

    def _install(self, seams: Sequence[Seam]) -> None:
        changes = [self._prepare(seam) for seam in seams]
        try:
            for change in changes:
                if change.place is not None:
                    setattr(change.place.owner, change.place.name, change.raw_hook)
            rebind((c.place.original, c.hook) for c in changes if c.place is not None and c.is_global)
            for change in changes:
                for holder in change.holders:
                    holder.set(change.hook)
            for change in changes:
                if change.place is None:
                    change.undo = self._register(change.seam)
        except BaseException:
            self._remove(changes)
            raise
        self.changes.update({change.seam.target: change for change in changes})

    def _prepare(self, seam: Seam) -> Change:
        """Verifies a seam in memory and builds its hook; changes nothing."""
        module = sys.modules[seam.module]
        if seam.kind == "register":
            return Change(seam)
        place = verify.find_place(seam, module)
        holders = [check_holder(path, seam.target, place.original) for path in seam.holders]
        build = wrapped_by(seam.impl) if seam.kind == "wrap" else resolve(seam.impl)
        hook = build(place.original)
        raw_hook = verify.rewrap_descriptor(place.raw, hook)
        return Change(seam, place, hook, raw_hook, [holder for holder in holders if holder is not None])

    def _register(self, seam: Seam) -> Callable[[], None]:
        undo = registered_by(seam.impl, seam.module)
        if not callable(undo):
            raise OverlayError(
                "bad_registration", seam.target, f"{seam.impl} returns a callable", repr(undo), "Report this."
            )
        return undo

    def _check_in_place(self, change: Change) -> None:
        place = change.place
        if place is None:
            return
        current = vars(place.owner).get(place.name)
        if current is not change.raw_hook:
            raise OverlayError(
                "wrapped_over",
                change.seam.target,
                "the hook that enable() put there",
                repr(current),
                "Take out the other library's change first, then call torch_overlay.disable() again.",
            )

    def _remove(self, changes: Sequence[Change]) -> None:
        for change in reversed(changes):
            if change.undo is not None:
                change.undo()
                change.undo = None
            for holder in change.holders:
                holder.set(change.place.original if change.place else None)
            if change.place is not None:
                setattr(change.place.owner, change.place.name, change.place.raw)
            self.changes.pop(change.seam.target, None)
        rebind((c.hook, c.place.original) for c in changes if c.place is not None)

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


def importing(name: str) -> OverlayError:
    return OverlayError(
        "torch_is_importing",
        name,
        "a module that is loaded or not loaded",
        "one whose import is under way further up the call stack",
        "Import torch before torch_overlay, outside of modules that torch itself imports.",
    )
