"""Verifies that the installed upstream code is the code that the seams were written against.

Two checks, both made before anything is changed.

On disk: the release must be base.json's or a patch release of it, the tree must not carry the patch series, and every
file that a seam touches must have the SHA-256 that base.json records. A file that differs is parsed, and then the
fingerprint of each seam's definition decides; edits elsewhere in the file don't matter. Hashing some thirty files takes
milliseconds; only another tree costs the time to parse.

In memory: the object that a seam is about to wrap must be the one which that file defines. It is not if another library
has put its own function there, which the seam's author has never seen.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay.errors import OverlayError
from torch_overlay.seams import DefinitionNotFound, fingerprint


if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from torch_overlay.seams import Seam

log = logging.getLogger("torch_overlay")


@functools.cache
def base() -> dict[str, Any]:
    """Return the release that the overlay was written for, and the SHA-256 of each upstream file that it touches."""
    path = Path(__file__).parent.parent / "base.json"
    try:
        record = json.loads(path.read_bytes())
        if not {"torch", "triton", "files"} <= set(record):
            raise ValueError("it names no release")
    except (OSError, ValueError, TypeError) as error:
        archived = isinstance(error, NotADirectoryError)
        remedy = "It does not run from an archive: unpack it." if archived else "Install the package again."
        raise OverlayError("broken_package", str(path), "the record of the release", str(error), remedy) from None
    return record


def torch_root() -> Path:
    """Return the folder that holds torch/."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise OverlayError("wrong_version", "torch", base()["torch"], "no torch", "Install it.")
    return Path(spec.origin).absolute().parent.parent


def found_version() -> str:
    """Return the version of the torch that is imported, without its local part (+cu132)."""
    return str(sys.modules["torch"].__version__).partition("+")[0]


def module_file(root: Path, module: str) -> Path:
    """Return the source file of an upstream module."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def untested() -> str:
    """Return a line about a patch release of base.json's release; empty for that release and for any other."""
    expected, found = base()["torch"], found_version()
    series, _, patch = found.rpartition(".")
    if found == expected or not patch.isdigit() or series != expected.rpartition(".")[0]:
        return ""
    return f"torch {found} was not tested; every function that the overlay changes is as in torch {expected}"


def check_version(root: Path, seams: Iterable[Seam]) -> None:
    """Check that the release is base.json's, or a patch release of it with the same code at every seam, that it was
    built with CUDA, and that the tree has not been patched.
    """
    torch: Any = sys.modules["torch"]
    expected, found = base()["torch"], found_version()
    if (root / "torch" / "_overlay").exists():
        raise OverlayError(
            "already_patched",
            str(root / "torch"),
            f"torch {expected} as released",
            "the patch series applied (torch/_overlay exists)",
            "There is nothing to install: use torch._overlay, or reverse the series with tools/apply_patches.py "
            "--reverse.",
        )
    remedy, fault = f"Install torch=={expected}, or the release of torch_overlay for torch {found}.", ""
    if torch.version.cuda is None:
        remedy, fault = f"Install torch=={expected} from PyPI: it runs without a GPU, too.", " without CUDA"
    elif line := untested():
        try:
            check_files(root, seams)
            log.warning("torch_overlay: %s", line)
        except OverlayError as error:
            fault = f", with {error.target} changed"
    if fault or found != expected and not untested():
        raise OverlayError(
            "wrong_version", "torch", f"torch {expected}, built with CUDA", f"torch {torch.__version__}{fault}", remedy
        )


def check_files(root: Path, seams: Iterable[Seam]) -> list[str]:
    """Check the source of every seam's target; return the files that differ from the release without harm."""
    edited: dict[str, str] = {}
    checked: set[str] = set()
    for seam in sorted(seams, key=lambda seam: seam.module):  # a file is parsed once
        path = module_file(root, seam.module)
        name = path.relative_to(root).as_posix()
        if name not in checked:
            checked.add(name)
            try:
                content = path.read_bytes()
            except OSError:
                raise missing(seam, f"the file {name}", "no such file") from None
            if hashlib.sha256(content).hexdigest() != base()["files"].get(name):
                edited[name] = content.decode()
        if name in edited and seam.fingerprint:
            check_fingerprint(seam, edited[name])
    return sorted(edited)


def check_fingerprint(seam: Seam, source: str) -> None:
    try:
        found = fingerprint(source, *seam.definitions)
    except (DefinitionNotFound, SyntaxError):
        names = seam.qualname or ", ".join(seam.methods)
        raise missing(seam, f"a definition of {names}", "none in the source file") from None
    if found != seam.fingerprint:
        raise OverlayError(
            "source_changed",
            seam.target,
            f"the definition with fingerprint {seam.fingerprint}, as in torch {base()['torch']}",
            f"one with fingerprint {found}",
            f"Reinstall torch=={base()['torch']} to get its files back.",
        )


def missing(seam: Seam, expected: str, found: str) -> OverlayError:
    return OverlayError("missing_target", seam.target, expected, found, f"Reinstall torch=={base()['torch']}.")


def check_origin(module: ModuleType) -> None:
    """Check that a module was loaded from the verified file, whoever loaded it."""
    expected, found = module_file(torch_root(), module.__name__), getattr(module, "__file__", None)
    if found is None or not os.path.exists(found) or not os.path.samefile(expected, found):
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        raise OverlayError(
            "source_changed",
            module.__name__,
            f"a module loaded from {expected}",
            f"one from {found}, by {type(loader).__name__}",
            "Another library's import hook loads it from elsewhere: leave that library out.",
        )


class SeamTarget(NamedTuple):
    """Location of a seam's target: the owner's __dict__ has `raw` under `name`; `original` is `raw` without its
    descriptor.
    """

    owner: Any
    name: str
    raw: Any
    original: Any

    def current(self) -> Any:
        return vars(self.owner).get(self.name)


def unwrap_descriptor(raw: Any) -> Any:
    """Return the function inside a static method or a class method. No seam is in a property."""
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def rewrap_descriptor(raw: Any, function: Any) -> Any:
    """Return a descriptor like `raw` around another function."""
    return type(raw)(function) if isinstance(raw, (staticmethod, classmethod)) else function


def find_place(seam: Seam, module: ModuleType) -> SeamTarget:
    """Return the place of the seam's target in a loaded module, read from the owner's own __dict__."""
    *classes, name = seam.qualname.split(".")
    owner: Any = module
    for part in classes:
        owner = vars(owner).get(part) if owner is not None else None
        owner = owner if isinstance(owner, type) else None
    if owner is None or name not in vars(owner):
        raise missing(seam, f"{seam.qualname} in the __dict__ of its owner", f"{owner or 'no such class'}")
    raw = vars(owner)[name]
    place = SeamTarget(owner, name, raw, unwrap_descriptor(raw))
    if "__overlay__" in getattr(place.original, "__dict__", {}):
        raise OverlayError(
            "installed_twice",
            seam.target,
            f"the function that {module.__file__} defines",
            f"a hook for {place.original.__overlay__}",
            "Import torch_overlay once: don't remove it from sys.modules, and keep one copy of it on sys.path. If "
            "another library has put back a hook that it saved, take that out.",
        )
    for definition in seam.definitions:
        check_own(vars(owner).get(definition.rpartition(".")[2]), definition, seam, module)
    return place


def check_own(raw: Any, qualname: str, seam: Seam, module: ModuleType) -> None:
    """Check that an object is what the module's source defines under a name."""
    found = unwrap_descriptor(raw)
    if not is_upstreams_own(found, qualname, module):
        code = getattr(found, "__code__", None)
        where = f" from {code.co_filename}:{code.co_firstlineno}" if code else ""
        raise OverlayError(
            "source_changed",
            seam.target if qualname == seam.qualname else f"{seam.module}:{qualname}",
            f"the function that {module.__file__} defines",
            f"{found!r}{where}",
            "Another library replaced it in memory: leave one out, or call torch_overlay.enable() before its import.",
        )


def is_upstreams_own(value: Any, qualname: str, module: ModuleType) -> bool:
    """True if this is the function that the module's source defines, under upstream's own decorators at most, and no
    function around a hook.
    """
    if "__overlay__" in getattr(value, "__dict__", {}):
        return False
    own_tree = str(Path(sys.modules["torch"].__file__ or "").parent)
    while True:
        kind = type(value)  # not its __class__: a proxy has the __class__ and __code__ of the object that it stands for
        if kind is FunctionType:
            code = value.__code__
            if code.co_filename == module.__file__ and code.co_qualname == qualname:
                return True
            if not code.co_filename.startswith((own_tree, contextlib.__file__, functools.__file__)):
                return False
        elif kind is not functools._lru_cache_wrapper:
            return False
        if not hasattr(value, "__wrapped__"):
            return False
        value = value.__wrapped__
