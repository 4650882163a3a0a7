"""Notes which parameters of Triton kernels are expressions of a capture's traced numbers.

Generated code launches a kernel by `kernel.run(*arguments, stream=...)`, where the kernel is a global of its module.
While a capture traces numbers, these globals are replaced (`noted`). A launch with traced numbers launches the kernel
with the plain values. Then it runs the kernel's launcher, whose Python code computes the grid, once more with the
traced numbers and with a function in place of the one that launches: it gets what the kernel gets.

With `shapes`, numbers may be sizes: all launches are noted, with the grid and with the offsets of the tensors.

Notes the sizes, strides and offsets that generated code computes from traced numbers: `Shapes`.

Generated code allocates and makes views by functions among its module's globals, which take plain numbers. While a
capture traces sizes, these functions are replaced (`launches.noted`): they get the plain values, and what the code
asked for is noted. Operators are refused, for nothing shows what they do with a size.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
import weakref
from typing import Any, NamedTuple, NoReturn, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, TYPES
from torch_overlay._inductor.relaunch.numbers.traced import (
    decide,
    deciding,
    largest,
    NumberEscaped,
    NumberUse,
    smallest,
    Traced,
)
from torch_overlay._inductor.relaunch.proof.functions import binary_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay._inductor.relaunch.numbers.expressions import Expression


VIEW = "reinterpret_tensor"
CHECKS = ("assert_size_stride", "assert_size_stride_grouped")


class Dims(NamedTuple):
    """How a tensor lies in its memory, in elements, as integers and traced ones."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype

    def bytes(self) -> Any:
        """Return the bytes from the first element to the end of the last one. There has to be one."""
        last = sum(((n - 1) * stride for n, stride in zip(self.size, self.stride)), start=0)
        return (last + 1) * self.dtype.itemsize


class Shapes:
    """What one capture shows of its tensors. `decisions`: what launches have to check of the numbers."""

    def __init__(self) -> None:
        self.decisions: dict[Expression, None] = {}
        self.allocations: dict[int, Dims] = {}  # by address
        self.outputs: list[Dims | None] = []
        self._views: dict[int, tuple[weakref.ref[torch.Tensor], Dims]] = {}

    def allocated(self, made: torch.Tensor, size: Sequence[Any], stride: Sequence[Any]) -> None:
        for n in size:
            decide("positive", n)
        self.allocations[made.data_ptr()] = Dims(tuple(size), tuple(stride), 0, made.dtype)

    def dims(self, tensor: torch.Tensor) -> Dims | None:
        """Return what is known of a tensor that generated code made; None if it made it in another way. Raises
        `NumberEscaped` if the tensor is another one."""
        ref, dims = self._views.get(id(tensor), (None, None))
        if ref is None or ref() is not tensor:
            dims = self.allocations.get(tensor.data_ptr())
        if dims is not None and plain(dims[:2]) != (tuple(tensor.size()), tuple(tensor.stride())):
            raise NumberEscaped(frozenset(), "a tensor lies otherwise in its memory than it was made")
        return dims

    def offset(self, tensor: torch.Tensor) -> Any:
        """Return the bytes from the start of an allocation or an input to the tensor's first element."""
        dims = self.dims(tensor)
        return 0 if dims is None else dims.offset * dims.dtype.itemsize

    def note_outputs(self, outputs: Sequence[Any]) -> None:
        self.outputs = [self.dims(v) if isinstance(v, torch.Tensor) else None for v in outputs]

    def replaced(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """Return what takes the place of functions among a generated module's globals."""
        made = {name: _with_plain(namespace[name]) for name in CHECKS if name in namespace}
        if VIEW in namespace:
            made[VIEW] = functools.partial(self._view, namespace[VIEW])
        return made

    def _view(
        self, view: Callable[..., torch.Tensor], tensor: torch.Tensor, size: Any, stride: Any, offset: Any
    ) -> torch.Tensor:
        before = self.dims(tensor)
        made = view(tensor, plain(size), plain(stride), plain(offset))
        dims = Dims(tuple(size), tuple(stride), (before.offset if before else 0) + offset, made.dtype)
        self._views[id(made)] = weakref.ref(made), dims
        return made


class NoOperators(TorchDispatchMode):
    """A dispatch mode in which an operator ends the tracing of sizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NumberEscaped(frozenset(), f"{func} is called")


def plain(value: Any) -> Any:
    """Return the plain value of a number, or of those in a tuple or list."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return value.value if isinstance(value, Traced) else value


def _with_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*plain(args))


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
        self.uses: list[NumberUse] = []
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
                    self.uses.append(NumberUse(made[0], number, letters[number], value.expression))

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
            self.uses.append(NumberUse(handle, -1 - axis, "i", blocks.expression))


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
