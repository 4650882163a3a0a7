"""Notes the sizes, strides and offsets that generated code computes from traced numbers: `Shapes`.

Generated code allocates and makes views by functions among its module's globals, which take plain numbers. While a
capture traces sizes, these functions are replaced (`launches.noted`): they get the plain values, and what the code
asked for is noted. Operators are refused, for nothing shows what they do with a size.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch.numbers.traced import decide, Escaped, Traced


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        `Escaped` if the tensor is another one."""
        ref, dims = self._views.get(id(tensor), (None, None))
        if ref is None or ref() is not tensor:
            dims = self.allocations.get(tensor.data_ptr())
        if dims is not None and plain(dims[:2]) != (tuple(tensor.size()), tuple(tensor.stride())):
            raise Escaped(frozenset(), "a tensor lies otherwise in its memory than it was made")
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
        raise Escaped(frozenset(), f"{func} is called")


def plain(value: Any) -> Any:
    """Return the plain value of a number, or of those in a tuple or list."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return value.value if isinstance(value, Traced) else value


def _with_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*plain(args))
