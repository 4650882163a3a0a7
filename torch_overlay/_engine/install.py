"""Installs all seams or none, and removes them without a trace.

Lifecycle, all under one lock:

    enable()   1. verify on disk: release, files, fingerprints of every seam       (verify.py)
               2. verify in memory: targets and holders in modules that are loaded
               3. build the hooks
               4. change: owners first, then those who hold the originals by value, then registrations
    import of a module that has seams: steps 2 to 4 for that module              (late_import.py)
    compilation: the same for modules that were loaded past our finder           (before_compilation)
    disable()  the changes in reverse, after checking that nobody has put anything around a hook, or in its place

An error in steps 1 to 3 changes nothing; an error in step 4 is rolled back. Invariants:

    1. The first original wins: a hook wraps what the owner's __dict__ held when the overlay was enabled.
    2. No module of ours is imported while the lock is held: another thread that holds the module's import lock may
       be waiting for our lock.
    3. Between enable() and disable() a loaded module has all of its seams, or is being imported right now. A module
       that was loaded past our finder gets its seams before anything is compiled, or the overlay is disabled with an
       error. So it is where another library has put upstream's object back in a hook's place.

Finds and rebinds the references that others hold to an upstream function.

Replacing an attribute of a function's owner does not reach those who took the function by value: modules that imported
it by name, and objects that stored it when their module was loaded (a dispatch table, a frozen record). The modules are
found by identity in the namespaces of all loaded modules, and so are the keys of Dynamo's rules. The objects are named
by the seam, as a path such as "torch._dynamo.variables.streams:StreamVariable.tp_methods[record_event].impl";
test/test_seams.py asks the garbage collector for every referrer of every original and fails if one is left that no seam
names.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

from torch_overlay.errors import OverlayError
from torch_overlay.hooks import registered_by, resolve, wrapped_by

from . import verify
from .late_import import is_importing, is_running_here, LateImportFinder


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType

    from torch_overlay.seams import Seam


log = logging.getLogger("torch_overlay")


@dataclass
class Change:
    """An installed seam, and the data that its removal needs."""

    seam: Seam
    place: verify.SeamTarget | None = None
    hook: Any = None
    raw_hook: Any = None
    holders: list[Holder] = field(default_factory=list)
    undo: Callable[[], None] | None = None

    @property
    def is_global(self) -> bool:
        """True if the change holds wherever modules imported the object by value. As in the patched form: the
        replacement of a name that a module imported from another one holds in that module only.
        """
        if self.place is None:
            return False
        return self.seam.kind == "wrap" or getattr(self.place.original, "__module__", None) == self.seam.module

    def identify(self, found: Any) -> Literal["hook", "original", "new", "other"]:
        """Return what an object at the target's place is; "new": as upstream's code defines it when it runs again."""
        function = verify.unwrap_descriptor(found)
        if self.place is None or function is self.hook:
            return "hook"
        if function is self.place.original:
            return "original"
        module = sys.modules.get(self.seam.module)
        can_be_new = self.seam.kind == "wrap" and module is not None
        return "new" if can_be_new and verify.is_upstreams_own(function, self.seam.qualname, module) else "other"


class Installer:
    """State of the overlay in this process."""

    def __init__(self, seams: Callable[[], Sequence[Seam]]) -> None:
        self.get_seams = seams
        self.lock = threading.RLock()
        self.changes: dict[str, Change] = {}
        # Modules that have their seams, each with the spec by which it was loaded: a reload gives it another spec.
        self.seamed: dict[str, tuple[ModuleType, Any]] = {}
        self.finder: LateImportFinder | None = None
        self.edited_files: list[str] = []
        self.off_because = "enable() has not been called"
        # A child must not be forked in the middle of an installation, nor get a lock that none of its threads holds.
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
        """Install every seam, or none. Does nothing if the overlay is enabled."""
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

        seams = self.get_seams()
        verify.check_version(root, seams)
        import torch_overlay.config  # noqa: F401  (refuses bad values of options in the environment)

        names = {seam.module for seam in seams}
        edited = verify.check_files(root, seams)
        while not self._install_loaded(names, seams):
            pass  # another thread began to import a module that we had not waited for
        self.edited_files = edited

    def _install_loaded(self, names: set[str], seams: Sequence[Seam]) -> bool:
        """Install the seams of the modules that are loaded, and the finder for the other modules. Return False, with
        nothing changed, if another thread has begun to import one of the modules meanwhile.
        """
        self._wait_for_imports(names)
        for seam in seams:
            if seam.kind != "wrap" and seam.module in sys.modules:
                resolve(seam.impl)
        with self.lock:
            if self.enabled:
                return True
            finder = LateImportFinder(names, self._module_loaded)
            finder.stand_first()
            try:
                loaded = {name for name in names if name in sys.modules and not finder.will_report(name)}
                if done := not any(is_importing(sys.modules.get(name)) for name in loaded):
                    self._install([seam for seam in seams if seam.module in loaded])
                    self.finder = finder
            finally:
                if self.finder is not finder:
                    finder.leave()
            return done

    def before_compilation(self, is_inner: bool = False) -> None:
        """Install the seams of modules that were loaded by a finder before ours in sys.meta_path, or by none. In the
        middle of another compilation, part of which ran without the seams, it is too late: disable the overlay and
        raise an error.
        """
        finder = self.finder
        if finder is None:
            return
        finder.stand_first()
        missed, taken = self.missed(), self.taken_out()
        if not missed and not taken:
            return
        if is_inner or taken:
            error = taken_out(taken) if taken else loaded_past(missed)
            self.disable(because=str(error))
            raise error
        self._wait_for_imports(missed)
        seams = [seam for seam in self.get_seams() if seam.module in missed]
        for seam in seams:
            if seam.kind != "wrap":
                resolve(seam.impl)
        with self.lock:
            missed = self.missed()
            if self.finder is not finder or not missed:
                return  # another thread has installed them
            self._install_or_disable([seam for seam in seams if seam.module in missed], "loaded past torch_overlay")
        log.warning(
            "torch_overlay: an import hook loaded %s past the overlay, which noticed at this compilation and has "
            "installed what belongs there. What was compiled before keeps upstream's behaviour until "
            "torch._dynamo.reset() is called. Install other import hooks before torch_overlay is imported.",
            ", ".join(sorted(missed)),
        )

    def missed(self) -> set[str]:
        """Return loaded modules that lack their seams: our finder hasn't reported their import, nor will it."""
        finder = self.finder
        if finder is None:
            return set()
        loaded = {name: m for name in finder.names if (m := sys.modules.get(name)) and not finder.will_report(name)}
        there: dict[str, set[str]] = {}
        for change, what in self._identified():
            if change.seam.kind == "wrap":
                there.setdefault(change.seam.module, set()).add(what)
        again = {name for name, found in there.items() if "new" in found and found.isdisjoint(("hook", "original"))}
        return {name for name, module in loaded.items() if name in again or not self._is_seamed(name, module)}

    def taken_out(self) -> list[str]:
        """Return the targets at which somebody has put upstream's object back; the module's code has not run again."""
        missed = self.missed()
        return [
            change.seam.target
            for change, what in self._identified()
            if what in ("original", "new") and change.seam.module not in missed
        ]

    def _identified(self) -> Iterator[tuple[Change, str]]:
        """Yield the changes of loaded modules, each with what is at its place."""
        for change in list(self.changes.values()):
            if change.place is not None and (module := sys.modules.get(change.seam.module)) is not None:
                yield change, change.identify(verify.current(change.seam, module))

    def _is_seamed(self, name: str, module: ModuleType) -> bool:
        seamed, spec = self.seamed.get(name, (None, None))
        return seamed is module and spec is getattr(module, "__spec__", None)

    def disable(self, because: str = "disable() was called") -> None:
        """Remove every seam. Does nothing if the overlay is not enabled."""
        with self.lock:
            finder = self.finder
            if finder is None:
                return
            for name in self.missed():
                self._forget(name)
            changes = list(self.changes.values())
            for change in changes:
                self._check_in_place(change)
            self._remove(changes)
            finder.leave()
            self.finder = None
            self.seamed.clear()
            self.off_because = because
        self._say_what_is_compiled("was disabled", "keeps the overlay's behaviour")

    def _wait_for_imports(self, names: Iterable[str]) -> None:
        """Wait for other threads' imports of modules with seams that began before our finder could find them."""
        for name in names:
            if is_importing(sys.modules.get(name)):
                # The import fails in the other thread, too; or that thread waits for this one.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
                module = sys.modules.get(name)
                if module is not None and is_importing(module):
                    raise importing(name, module)

    def _module_loaded(self, module: ModuleType) -> None:
        """Install the seams of a module that was just imported."""
        seams = [seam for seam in self.get_seams() if seam.module == module.__name__]
        for seam in seams:
            if seam.kind != "wrap":
                resolve(seam.impl)
        with self.lock:
            if not self.enabled:
                return
            self._install_or_disable(seams, "imported")

    def _install_or_disable(self, seams: Sequence[Seam], event: str) -> None:
        """Install the seams of modules that came after enable(); if one can't have its seams, disable the overlay."""
        names = {seam.module for seam in seams}
        for name in names:
            self._forget(name)
        try:
            self._install(seams)
        except OverlayError as error:
            self.disable(because=f"{', '.join(sorted(names))} was {event}: {error}")
            raise

    def _forget(self, module_name: str) -> None:
        """Drop the changes of a module that is loaded again: the objects that they changed are gone."""
        for target in [target for target, change in self.changes.items() if change.seam.module == module_name]:
            del self.changes[target]

    def _install(self, seams: Sequence[Seam]) -> None:
        modules = {seam.module: sys.modules[seam.module] for seam in seams}
        for module in modules.values():
            verify.check_origin(module)
        changes = [self._prepare(seam) for seam in seams]
        try:
            for change in changes:
                if change.place is not None:
                    setattr(change.place.owner, change.place.name, change.raw_hook)
            rebind((c.place.original, c.hook, c.seam) for c in changes if c.place is not None and c.is_global)
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
        self.seamed.update({name: (module, getattr(module, "__spec__", None)) for name, module in modules.items()})

    def _prepare(self, seam: Seam) -> Change:
        """Verify a seam in memory and build its hook; change nothing."""
        module = sys.modules[seam.module]
        if seam.kind == "register":
            return Change(seam)
        place = verify.find_place(seam, module)
        holders = [find_holder(path, seam.target, place.original) for path in seam.holders]
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
        if current is not change.raw_hook and change.identify(current) not in ("original", "new"):
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
        rebind((c.hook, c.place.original, c.seam) for c in changes if c.place is not None)

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


def loaded_past(names: Iterable[str]) -> OverlayError:
    return OverlayError(
        "loaded_past",
        ", ".join(sorted(names)),
        "a module that is loaded through torch_overlay's finder",
        "one that an import hook loaded past it, in the middle of a compilation",
        "Install other import hooks before torch_overlay is imported. After torch_overlay.enable() and "
        "torch._dynamo.reset() everything is compiled with it.",
    )


def taken_out(targets: Iterable[str]) -> OverlayError:
    return OverlayError(
        "taken_out",
        ", ".join(targets),
        "the hook that enable() put there",
        "upstream's own object",
        "Import torch_overlay before the library that puts back what it has saved, or after it has done so. After "
        "torch_overlay.enable() and torch._dynamo.reset() everything is compiled with it.",
    )


def importing(name: str, module: ModuleType) -> OverlayError:
    where = "further up the call stack" if is_running_here(module) else "in a thread that waits for this one"
    return OverlayError(
        "torch_is_importing",
        name,
        "a module that is loaded or not loaded",
        f"one whose import is under way {where}",
        "Import torch before torch_overlay, outside of modules that torch itself imports.",
    )


STEP = re.compile(r"\.(\w+)|\[([^\]]+)\]")


class Holder(NamedTuple):
    """Place, `container.name` or `container[name]`, that holds a function by value."""

    container: Any
    name: str
    is_item: bool

    def get(self) -> Any:
        return self.container[self.name] if self.is_item else getattr(self.container, self.name)

    def set(self, value: Any) -> None:
        if self.is_item:
            self.container[self.name] = value
        else:
            object.__setattr__(self.container, self.name, value)  # also sets the fields of a frozen record


def find_holder(path: str, target: str, expected: Any) -> Holder | None:
    """Return the holder at a path, which must hold `expected`; None while its module is not loaded (it will pick up the
    hook by itself then).
    """
    module_name, _, rest = path.partition(":")
    container: Any = sys.modules.get(module_name)
    if container is None:
        return None
    *steps, (attribute, item) = STEP.findall("." + rest)
    try:
        for name, key in steps:
            container = getattr(container, name) if name else container[key]
        holder = Holder(container, attribute or item, bool(item))
        found = holder.get()
    except (AttributeError, KeyError, TypeError) as error:
        raise OverlayError("missing_holder", target, path, repr(error), "Report this: the seam is wrong.") from error
    if found is not expected:
        remedy = "Another library replaced it in memory: import torch_overlay before that library, or leave one out."
        raise OverlayError("missing_holder", target, f"{path} is {expected!r}", repr(found), remedy)
    return holder


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
