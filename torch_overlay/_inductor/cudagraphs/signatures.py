"""What is declared of the kernels in a generated module, for `template.prove(signatures=...)`.

Triton knows of each parameter whether it is a pointer or a number. The proof uses it twice: a pointer that moved in
no known way is refused even where it could pass for rubbish, and a number that equals an address by coincidence is no
reason for another capture. Kernels are told apart by their function handle, since names repeat.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

POINTER, SCALAR, UNKNOWN = "p", "s", "?"
SCRATCH = POINTER * 2  # Triton's global and profile scratch, behind the declared parameters


def signatures_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Function handle -> a letter per parameter, for the Triton kernels among a module's globals. Kernels that have
    not been loaded yet, and those with parameters of other kinds, are left out."""
    found: dict[int, str] = {}
    for value in list(namespace.values()):
        for launcher in getattr(value, "launchers", None) or ():
            binary = _binary(launcher)
            letters = _letters(binary)
            if letters is not None:
                found.update(dict.fromkeys(_handles(binary), letters))
    return found


def _binary(launcher: Any) -> Any:
    """The kernel object behind a launcher: Triton's, or that of torch's static launcher, whose method it runs."""
    runner = getattr(launcher, "__globals__", {}).get("runner")
    return getattr(launcher, "bin", None) or getattr(runner, "__self__", None)


def _handles(binary: Any) -> Iterator[int]:
    """A kernel of torch's static launcher has a handle for each device it ran on."""
    functions = getattr(binary, "functions", None) or {}
    for function in (getattr(binary, "function", None), *functions.values()):
        if function:
            yield int(function)


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
