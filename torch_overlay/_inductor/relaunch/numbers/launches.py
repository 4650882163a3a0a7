"""Notes which parameters of Triton kernels are expressions of a capture's traced numbers.

Generated code launches a kernel by `kernel.run(*arguments, stream=...)`, where the kernel is a global of its module.
While a capture traces numbers, these globals are replaced (`noted`). A launch with traced numbers launches the kernel
with the plain values. Then it runs the kernel's launcher, whose Python code computes the grid, once more with the
traced numbers and with a function in place of the one that launches: it gets what the kernel gets.

With `shapes`, numbers may be sizes: all launches are noted, with the grid and with the offsets of the tensors.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
from typing import Any, NamedTuple, NoReturn, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, TYPES
from torch_overlay._inductor.relaunch.numbers.shapes import plain
from torch_overlay._inductor.relaunch.numbers.traced import decide, deciding, Escaped, largest, smallest, Traced
from torch_overlay._inductor.relaunch.numbers.words import Use
from torch_overlay._inductor.relaunch.proof.signatures import binary_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay._inductor.relaunch.numbers.expressions import Expression
    from torch_overlay._inductor.relaunch.numbers.shapes import Shapes

POINTER_LETTER = "O"  # of torch's static launcher
COMPARING = {"max": largest, "min": smallest}  # among the builtins of generated code
MOST_IN_A_ROW = (1 << 16) - 1  # blocks in the second and in the third dimension of a grid


class Offset(NamedTuple):
    """How many bytes from the start of its region a parameter of a node points to."""

    handle: int
    parameter: int
    expression: Expression


class Launches:
    def __init__(self, nodes: Callable[[], Sequence[int]], shapes: Shapes | None = None) -> None:
        """`nodes()` returns the handles of the nodes that the captured graph has so far."""
        self.nodes, self.shapes = nodes, shapes
        self.uses: list[Use] = []
        self.offsets: list[Offset] = []
        self.handles: set[int] = set()  # of the nodes that were noted
        self.thread = threading.get_ident()

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Traced)]
        if not given and self.shapes is None:
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
        if self.shapes is not None and not set(letters) <= {POINTER_LETTER, *TYPES}:
            _escape(given, "a kernel takes a descriptor, or a type that launches do not convert")

        def note(x: Any, y: Any, z: Any, stream: Any, *arguments: Any) -> None:
            self._note_grid(made[0], (x, y, z))
            for number, value in enumerate(arguments):
                if isinstance(value, torch.Tensor) and self.shapes is not None:
                    self._note_offset(made[0], number, self.shapes.offset(value))
                if isinstance(value, Traced):
                    if number >= len(letters) or letters[number] not in TYPES:
                        _escape([value], "a kernel takes it as a type that launches do not convert")
                    self.uses.append(Use(made[0], number, letters[number], value.expression))

        called = type(launcher)(launcher.__code__, {**launcher.__globals__, **COMPARING, "runner": note})
        called(*args, **kwargs)
        self.handles.add(made[0])
        return result

    def _note_offset(self, handle: int, parameter: int, offset: Any) -> None:
        if isinstance(offset, Traced):
            self.offsets.append(Offset(handle, parameter, offset.expression))

    def _note_grid(self, handle: int, grid: Sequence[Any]) -> None:
        for axis, blocks in enumerate(grid):
            if not isinstance(blocks, Traced):
                continue
            if self.shapes is None:
                _escape([blocks], "the grid of a kernel is computed from it")
            decide("positive", blocks)
            if axis:
                decide("positive", MOST_IN_A_ROW + 1 - blocks)
            self.uses.append(Use(handle, -1 - axis, "i", blocks.expression))


def _escape(values: Sequence[Traced], how: str) -> NoReturn:
    raise Escaped(inputs_of([v.expression for v in values]), how)


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
    shapes = launches.shapes
    functions = COMPARING if shapes is None else COMPARING | shapes.replaced(scope)
    originals = {name: scope[name] for name in (*kernels, *functions) if name in scope}
    try:
        scope.update({name: _Noted(kernel, launches) for name, kernel in kernels.items()})
        for name, function in functions.items():
            original = originals.get(name) or getattr(builtins, name)
            scope[name] = functools.partial(_in_thread, launches.thread, function, original)
        with contextlib.nullcontext() if shapes is None else deciding(shapes.decisions):
            yield
    finally:
        scope.update(originals)
        for name in functions.keys() - originals:
            scope.pop(name, None)


def _in_thread(thread: int, function: Callable[..., Any], original: Callable[..., Any], *args: Any) -> Any:
    return (function if threading.get_ident() == thread else original)(*args)
