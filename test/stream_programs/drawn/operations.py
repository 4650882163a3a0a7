"""What a drawn program computes: operators as text, and what the writer has to know of each.

Values are whole numbers, and stay small, so that results are exact in any order of summation. `bound` limits what an
operator makes of operands with given bounds, `gain` by how much a gradient grows on its way back. `saves` says what
autograd keeps for the backward: o the operands, r the result; what it keeps must not be written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


SIZE = 32
FULL = (SIZE, SIZE)
SHAPES = {FULL: "matrix", (1, SIZE): "row", (SIZE, 1): "column", (): "number"}


def same(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of operands that are broadcast."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    sizes = [max(sizes) for sizes in zip(*padded)]
    if any(s not in (1, size) for shape in padded for s, size in zip(shape, sizes)):
        return None
    return tuple(sizes)


def full(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    return FULL if all(s == FULL for s in shapes) else None


def always(shape: tuple[int, ...]) -> Callable[..., tuple[int, ...] | None]:
    return lambda *shapes: shape if all(s == FULL for s in shapes) else None


@dataclass(frozen=True)
class Operation:
    text: str
    arity: int = 1
    shape: Callable[..., tuple[int, ...] | None] = same
    bound: Callable[..., float] = lambda *bounds: sum(bounds)
    gain: float = 1.0
    saves: str = ""
    gradient: bool = True  # does the result carry one?
    weight: bool = False
    random: bool = False


def largest(*bounds: float) -> float:
    return max(bounds)


def fixed(bound: float) -> Callable[..., float]:
    return lambda *bounds: bound


OPERATIONS = (
    Operation("{a} + {b}", 2),
    Operation("{a} + 1", bound=lambda a: a + 1),
    Operation("{a} * 2", bound=lambda a: 2 * a, gain=2),
    Operation("sleep({a}) + {b}", 2),
    Operation("sleep({a}) * 3", bound=lambda a: 3 * a, gain=3),
    Operation("{a} @ {w}", 1, full, lambda a: 2 * a, 2, "o", weight=True),
    Operation("sleep({a}) @ {w}", 1, full, lambda a: 2 * a, 2, "o", weight=True),
    Operation("{a}.relu()", bound=largest, saves="r"),
    Operation("{a}.clamp(-1, 1) * {b}", 2, bound=lambda a, b: b, gain=32, saves="o"),
    Operation("{a} - {b}", 2),
    Operation("{a}.sum(0, keepdim=True)", 1, always((1, SIZE)), lambda a: SIZE * a),
    Operation("{a}.sum(1, keepdim=True)", 1, always((SIZE, 1)), lambda a: SIZE * a),
    Operation("{a}.sum()", 1, always(()), lambda a: SIZE * SIZE * a),
    Operation("{a}.detach().amax(1, keepdim=True)", 1, always((SIZE, 1)), largest, gradient=False),
    Operation("torch.cat([{a}, {b}])[16:48]", 2, full, largest),
    Operation("torch.where({a} > 0, {a}, {b})", 2, bound=largest, saves="o"),
    Operation("({a} > 0).float()", bound=fixed(1), gradient=False),
    Operation("{a}.clamp(-1, 1) @ {b}.sign()", 2, full, fixed(SIZE), SIZE, "o"),
    # `contiguous` of what is transposed twice is no copy.
    Operation("{a}.t().clone(memory_format=torch.contiguous_format)", 1, full, largest),
    Operation("F.dropout({a}, 0.5)", bound=lambda a: 2 * a, gain=2, saves="r", random=True),
    Operation('torch.ones(32, 32, device="cuda")', 0, lambda: FULL, fixed(1), gradient=False),
    Operation("torch.zeros_like({a})", bound=fixed(0), gradient=False),
    Operation("double({a}.detach())", bound=lambda a: 2 * a, gradient=False),
    Operation("{a}.cumsum(0)", 1, full, lambda a: SIZE * a, SIZE),
    Operation("{a}.clone()", bound=largest),
)

BY_TEXT = {operation.text: operation for operation in OPERATIONS}


@dataclass(frozen=True)
class InPlace:
    """An update of {a}, a matrix or a view of one; {b} is broadcast to it."""

    text: str
    arity: int
    bound: Callable[..., float]
    reads: bool = True  # its own value
    chains: bool = True  # returns what it writes
    gradient: bool = False  # may {a} be one that carries a gradient?


UPDATES = (
    InPlace("{a}.add_({b})", 2, lambda a, b: a + b, gradient=True),
    InPlace("{a}.mul_(2)", 1, lambda a: 2 * a, gradient=True),
    InPlace("{a}.copy_({b})", 2, largest, reads=False),
    InPlace("{a}.zero_()", 1, fixed(0), reads=False),
    InPlace("{a}.clamp_(-2, 2)", 1, lambda a: min(a, 2)),
    InPlace("{a}[1:9] = 3", 1, lambda a: max(a, 3), chains=False),
    InPlace("{a}[:, ::2].add_({b}[:, ::2])", 2, lambda a, b: a + b, chains=False),
    InPlace("{a}[4:20].copy_({b}[8:24])", 2, largest, chains=False),
    InPlace("add_to({a}, {b})", 2, lambda a, b: a + b, chains=False),
    InPlace("torch.add({a}, {b}, out={a})", 2, lambda a, b: a + b, chains=False),
    InPlace("{a}.relu_()", 1, largest),
)

# Views of a matrix: text and shape.
VIEWS = (
    ("{a}.t()", FULL),
    ("{a}.view(16, 64)", (16, 64)),
    ("{a}[1:]", (31, SIZE)),
    ("{a}[:, 1:]", (SIZE, 31)),
    ("{a}[8:24]", (16, SIZE)),
    ("{a}[:, ::2]", (SIZE, 16)),
    ("{a}[3:4]", (1, SIZE)),
    ("{a}[:, 5:6]", (SIZE, 1)),
    ("{a}.view(32, 32)", FULL),
)

__all__ = ["FULL", "Operation", "OPERATIONS", "SHAPES", "SIZE", "UPDATES", "VIEWS"]
