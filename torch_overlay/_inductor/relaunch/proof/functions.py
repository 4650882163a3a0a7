"""Reads the declared parameters of the kernels in a generated module, for `prove.prove(signatures=...)`.

Triton knows of each parameter whether it is a pointer or a number. The proof uses that twice: a pointer that moved in
no known way is refused even where it could pass for garbage, and a number that equals an address by coincidence is no
reason for another capture. Kernels are identified by their function handle, since names repeat.
"""

from __future__ import annotations

import re
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


POINTER, SCALAR, UNKNOWN = "p", "s", "?"
READ, WRITE, HIDDEN = "r", "w", "h"  # hidden: memory that the program doesn't know of
ONLY_READ = re.compile(r"in_ptr\d+")
# Kernels that Inductor writes itself: they load and store at their parameters, and look for addresses nowhere else.
WRITTEN_BY_INDUCTOR = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
SCRATCH = POINTER * 2  # Triton's global and profile scratch, after the declared parameters


def signatures_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return function handle -> a letter per parameter, for the Triton kernels among a module's globals. Kernels that
    have not been loaded yet, and those with parameters of other kinds, are left out."""
    return {handle: letters for _, handle, letters in _loaded(namespace)}


def _loaded(namespace: Mapping[str, Any]) -> Iterator[tuple[Any, int, str]]:
    """Yield each kernel among a module's globals, with each of its function handles, and a letter per declared
    parameter. torch's static launcher has a handle for each device that the kernel ran on."""
    for value in list(namespace.values()):
        for launcher in getattr(value, "launchers", None) or ():
            binary = binary_of(launcher)
            if (letters := _letters(binary)) is not None:
                functions = getattr(binary, "functions", None) or {}
                handles = filter(None, (getattr(binary, "function", None), *functions.values()))
                yield from ((value, int(handle), letters) for handle in handles)


def parameters_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return function handle -> a letter per parameter, for the kernels that Inductor writes. The letter of a pointer
    says whether the kernel only reads there, or may write."""
    found: dict[int, str] = {}
    for kernel, handle, declared in _loaded(namespace):
        if getattr(getattr(kernel, "heuristic_type", None), "name", None) not in WRITTEN_BY_INDUCTOR:
            continue
        letters = _reads_and_writes(kernel)
        # Triton's scratch memories are after the parameters that have names.
        if declared.startswith(letters.translate(UNNAMED)):
            found[handle] = letters + HIDDEN * (len(declared) - len(letters))
    return found


UNNAMED = str.maketrans({READ: POINTER, WRITE: POINTER})


def _reads_and_writes(kernel: Any) -> str:
    """Return a letter per parameter. A kernel only reads a pointer called in_ptr<n>, unless it is listed as mutated."""
    letters = ""
    constants = kernel.triton_meta.get("constants", {})
    for position, (name, kind) in enumerate(kernel.triton_meta["signature"].items()):
        if kind == "constexpr" or name in constants or (position,) in constants:
            continue
        if not str(kind).startswith("*"):
            letters += SCALAR
        else:
            letters += READ if ONLY_READ.fullmatch(name) and name not in kernel.mutated_arg_names else WRITE
    return letters


def binary_of(launcher: Any) -> Any:
    """Return the kernel object of a launcher: Triton's, or that of torch's static launcher, whose method it runs."""
    scope = getattr(launcher, "__globals__", {})
    return getattr(launcher, "bin", None) or scope.get("bin") or getattr(scope.get("runner"), "__self__", None)


def static_binary_of(kernel: Any) -> tuple[Any, Any]:
    """Return a kernel's launcher and its kernel object, if it has one, torch's static launcher; else None of both."""
    launchers = getattr(kernel, "launchers", ())
    if len(launchers) != 1 or not getattr(launchers[0], "_is_static", False):
        return None, None
    return launchers[0], binary_of(launchers[0])


def _letters(binary: Any) -> str | None:
    static = getattr(binary, "arg_tys", None)
    if static is not None:
        letters = "".join({"O": POINTER, "M": UNKNOWN}.get(letter, SCALAR) for letter in static)
        for flag in ("has_global_scratch", "has_profile_scratch"):
            letters += POINTER if getattr(binary, flag, False) else ""
        return letters
    source = getattr(binary, "src", None)
    signature = getattr(source, "signature", None)
    if signature is None:
        return None
    constants = {key[0] for key in getattr(source, "constants", {}) if isinstance(key, tuple) and len(key) == 1}
    letters = ""
    for position, kind in enumerate(signature.values()):
        if kind == "constexpr" or position in constants:
            continue
        if not isinstance(kind, str) or kind.startswith(("tensordesc", "nvTmaDesc")):
            return None
        letters += POINTER if kind.startswith("*") else SCALAR
    return letters + SCRATCH
