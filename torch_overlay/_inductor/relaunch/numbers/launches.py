"""Notes which parameters of Triton kernels are expressions of a capture's traced numbers.

Generated code launches a kernel by `kernel.run(*arguments, stream=...)`, where the kernel is a global of its module.
While a capture traces numbers, these globals are replaced (`noted`). A launch with traced numbers launches the kernel
with the plain values. Then it runs the kernel's launcher, whose Python code computes the grid, once more with the
traced numbers and with a function in place of the one that launches: it gets what the kernel gets.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NoReturn, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, TYPES
from torch_overlay._inductor.relaunch.numbers.traced import (
    largest,
    NumberEscaped,
    plain,
    smallest,
    Traced,
)
from torch_overlay._inductor.relaunch.proof.functions import static_binary_of
from torch_overlay._inductor.relaunch.proof.nodes import NumberSlot


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


POINTER_LETTER = "O"  # of torch's static launcher
COMPARING = {"max": largest, "min": smallest}  # among the builtins of generated code


class Launches:
    def __init__(self, nodes: Callable[[], Sequence[int]]) -> None:
        """`nodes()` returns the handles of the nodes that the captured graph has so far."""
        self.nodes = nodes
        self.uses: list[NumberSlot] = []  # by the handle of the node

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Traced)]
        if not given:
            return kernel.run(*args, **kwargs)
        before = set(self.nodes())
        named = {name: plain(value) for name, value in kwargs.items()}
        result = kernel.run(*map(plain, args), **named)  # before its launcher is asked: this may choose the launcher
        made = [node for node in self.nodes() if node not in before]
        launcher, binary = static_binary_of(kernel)
        if len(made) != 1 or launcher is None:
            _escape(given, "a kernel that gets it is not launched once, by torch's static launcher")
        letters = binary.arg_tys

        def note(x: Any, y: Any, z: Any, stream: Any, *arguments: Any) -> None:
            if blocks := [v for v in (x, y, z) if isinstance(v, Traced)]:
                _escape(blocks, "the grid of a kernel is computed from it")
            for number, value in enumerate(arguments):
                if isinstance(value, Traced):
                    if number >= len(letters) or letters[number] not in TYPES:
                        _escape([value], "a kernel takes it as a type that launches do not convert")
                    self.uses.append(NumberSlot(made[0], number, letters[number], value.expression))

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


class LaunchedBy:
    """Stands for a kernel among the globals of a generated module: `launch(kernel, ...)` runs it."""

    def __init__(self, kernel: Any, launch: Callable[..., Any]) -> None:
        self._kernel, self.run = kernel, functools.partial(launch, kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def noted(namespace: dict[str, Any], launches: Launches) -> contextlib.AbstractContextManager[None]:
    """Note the launches with traced numbers by the kernels of the generated module with these globals. Other threads
    have no such numbers, and what stands for a global does the same as that for them."""
    kernels = {name: v for name, v in namespace.items() if hasattr(v, "launchers") and hasattr(v, "run")}
    made = {name: LaunchedBy(kernel, launches.launch) for name, kernel in kernels.items()}
    return replaced(namespace, {**made, **COMPARING})
