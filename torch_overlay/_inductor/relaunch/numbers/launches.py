"""Notes which parameters of Triton kernels are expressions of a capture's traced numbers.

Generated code launches a kernel by `kernel.run(*arguments, stream=...)`, where the kernel is a global of its module.
While a capture traces numbers, these globals are replaced (`noted`). A launch with traced numbers launches the kernel
with the plain values. Then it runs the kernel's launcher, whose Python code computes the grid, once more with the
traced numbers and with a function in place of the one that launches: it gets what the kernel gets.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
from typing import Any, NoReturn, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, TYPES
from torch_overlay._inductor.relaunch.numbers.traced import (
    largest,
    NumberEscaped,
    NumberUse,
    plain,
    smallest,
    Traced,
)
from torch_overlay._inductor.relaunch.proof.functions import binary_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


POINTER_LETTER = "O"  # of torch's static launcher
COMPARING = {"max": largest, "min": smallest}  # among the builtins of generated code


class Launches:
    def __init__(self, nodes: Callable[[], Sequence[int]]) -> None:
        """`nodes()` returns the handles of the nodes that the captured graph has so far."""
        self.nodes = nodes
        self.uses: list[NumberUse] = []
        self.thread = threading.get_ident()

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Traced)]
        if not given:
            return kernel.run(*args, **kwargs)
        before = set(self.nodes())
        named = {name: plain(value) for name, value in kwargs.items()}
        result = kernel.run(*map(plain, args), **named)  # before its launcher is asked: this may choose the launcher
        made = [node for node in self.nodes() if node not in before]
        launchers = getattr(kernel, "launchers", ())
        if len(made) != 1 or len(launchers) != 1:
            _escape(given, "a kernel that gets it is launched in an unknown way")
        (launcher,) = launchers
        if not getattr(launcher, "_is_static", False):
            _escape(given, "a kernel that gets it is not launched by torch's static launcher")
        letters = binary_of(launcher).arg_tys

        def note(x: Any, y: Any, z: Any, stream: Any, *arguments: Any) -> None:
            if blocks := [v for v in (x, y, z) if isinstance(v, Traced)]:
                _escape(blocks, "the grid of a kernel is computed from it")
            for number, value in enumerate(arguments):
                if isinstance(value, Traced):
                    if number >= len(letters) or letters[number] not in TYPES:
                        _escape([value], "a kernel takes it as a type that launches do not convert")
                    self.uses.append(NumberUse(made[0], number, letters[number], value.expression))

        show(launcher, note, args, kwargs)
        return result


def show(launcher: Any, note: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a static launcher with `note` in place of the function that launches: (x, y, z, stream, *arguments)."""
    called = type(launcher)(launcher.__code__, {**launcher.__globals__, **COMPARING, "runner": note})
    called(*args, **kwargs)


@contextlib.contextmanager
def replaced(namespace: dict[str, Any], stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Replace globals of a generated module, builtins among them."""
    originals = {name: namespace[name] for name in stand_ins if name in namespace}
    try:
        namespace.update(stand_ins)
        yield
    finally:
        namespace.update(originals)
        for name in stand_ins.keys() - originals:
            namespace.pop(name, None)


def _escape(values: Sequence[Traced], how: str) -> NoReturn:
    raise NumberEscaped(inputs_of([v.expression for v in values]), how)


class _Noted:
    """Stands for a kernel among the globals of a generated module."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self._kernel, self._launches = kernel, launches

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._launches.thread:
            return self._kernel.run(*args, **kwargs)
        return self._launches.launch(self._kernel, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@contextlib.contextmanager
def noted(namespace: dict[str, Any] | None, launches: Launches) -> Iterator[None]:
    """Note what this thread launches by the kernels of the generated module with these globals."""
    scope = {} if namespace is None else namespace
    kernels = {name: v for name, v in scope.items() if hasattr(v, "launchers") and hasattr(v, "run")}
    made: dict[str, Any] = {name: _Noted(kernel, launches) for name, kernel in kernels.items()}
    for name, function in COMPARING.items():
        original = scope.get(name) or getattr(builtins, name)
        made[name] = functools.partial(_in_thread, launches.thread, function, original)
    with replaced(scope, made):
        yield


def _in_thread(thread: int, function: Callable[..., Any], original: Callable[..., Any], *args: Any) -> Any:
    return (function if threading.get_ident() == thread else original)(*args)
