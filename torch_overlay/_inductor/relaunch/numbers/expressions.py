"""Expressions of a region's numbers: what generated code computes from them, as data that can be evaluated again.

An expression is a tuple: ("input", position, type), ("const", value, bits), or an operation with its operands, which
are expressions:

    add sub mul floordiv mod neg        of integers, as Python computes them
    fadd fsub fmul fdiv fneg            of floats
    ceil floor                          a float as an integer
    float                               an integer as a float
    max                                 of two integers
    positive nonzero zero               an integer itself; it is unfit if it is anything else

A launch computes them in C, where integers have 64 bits, and an integer that becomes a float has at most 53. Numbers
for which that is not enough are unfit: the region then runs as compiled.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


Expression: TypeAlias = "tuple[Any, ...]"

BITS_OF_FLOAT = 53
LARGEST = 64  # operations in one expression


class Unfit(Exception):
    """A number is too large for the program or a parameter, has another type, or is not what code was chosen for."""


def _checked(name: str, value: int) -> int:
    if not SAID[name](value):
        raise Unfit(f"{value} is not {name}")
    return value


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "fadd": operator.add,
    "fsub": operator.sub,
    "fmul": operator.mul,
    "fdiv": operator.truediv,
    "fneg": operator.neg,
    "ceil": math.ceil,
    "floor": math.floor,
    "float": float,
}
SAID = {"positive": lambda v: v > 0, "nonzero": lambda v: v != 0, "zero": lambda v: v == 0}
OPERATIONS |= {"max": max, **{name: functools.partial(_checked, name) for name in SAID}}

# Types of kernel parameters by the letter of torch's static launcher.
TYPES: dict[str, Any] = {
    "b": ctypes.c_int8,
    "h": ctypes.c_int16,
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "B": ctypes.c_uint8,
    "H": ctypes.c_uint16,
    "I": ctypes.c_uint32,
    "K": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
FLOATS = "fd"


def constant(value: Any) -> Expression:
    """Return the expression of a constant. It has the bits of a float, for 0.0 equals -0.0."""
    return "const", value, value.hex() if type(value) is float else ""


def parts_of(expression: Expression) -> Iterator[Expression]:
    """Yield the expressions that this one is made of, operands first."""
    if expression[0] in OPERATIONS:
        for operand in expression[1:]:
            yield from parts_of(operand)
    yield expression


def inputs_of(expressions: Iterable[Expression]) -> frozenset[int]:
    """Return the positions of the inputs that the expressions are computed from."""
    return frozenset(part[1] for expression in expressions for part in parts_of(expression) if part[0] == "input")


def moved(expression: Expression, positions: Mapping[int, int]) -> Expression:
    """Return the expression for inputs that have moved to these positions."""
    kind, *operands = expression
    if kind == "input":
        return kind, positions[operands[0]], operands[1]
    return expression if kind == "const" else (kind, *[moved(operand, positions) for operand in operands])


def evaluate(expression: Expression, inputs: Any) -> Any:
    """Return the expression's value for these inputs, a sequence or a mapping by position. Raises `Unfit`."""
    kind, *operands = expression
    if kind == "input":
        value = inputs[operands[0]]
        if type(value) is not operands[1]:
            raise Unfit(f"input {operands[0]} is a {type(value).__name__} instead of a {operands[1].__name__}")
        return _fit(value)
    if kind == "const":
        return _fit(operands[0])
    values = [evaluate(operand, inputs) for operand in operands]
    if kind in ("float", "ceil", "floor") and not abs(values[0]) <= 1 << BITS_OF_FLOAT:
        raise Unfit(f"{values[0]} has more than {BITS_OF_FLOAT} bits")
    try:
        return _fit(OPERATIONS[kind](*values))
    except ZeroDivisionError as error:
        raise Unfit(str(error)) from None


def _fit(value: Any) -> Any:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Unfit(f"{value} has more than 64 bits")
    return value


def pack(letter: str, value: Any) -> bytes:
    """Return the bytes of a kernel parameter, as a launcher makes them. Raises `Unfit`."""
    kind = TYPES[letter]
    if letter in FLOATS:
        return bytes(kind(float(value)))
    if type(value) is not int or kind(value).value != value:
        raise Unfit(f"{value!r} does not fit into a parameter of type {kind.__name__}")
    return bytes(kind(value))


CODES = {name: number for number, name in enumerate(OPERATIONS)}  # as in the C source
LETTERS = "".join(TYPES)  # a type's place here is its number in the C source


class RegisterProgram(NamedTuple):
    """Expressions as `csrc/numbers.c` runs them: one list of operations on registers. First come those of the inputs,
    then those of the constants, then one for the result of each operation. The type of an input is 0 for integers and 1
    for floats."""

    inputs: tuple[tuple[int, int], ...]  # (position, type)
    constants: tuple[Any, ...]
    code: tuple[tuple[int, int, int], ...]  # (operation, register, register)
    results: tuple[int, ...]  # the register of each expression

    @staticmethod
    def of(expressions: Sequence[Expression], others: Sequence[Expression] = ()) -> RegisterProgram:
        """`others`: expressions for which numbers have to fit, too, and which are no results."""
        parts = dict.fromkeys(part for expression in (*expressions, *others) for part in parts_of(expression))
        inputs, constants = ([part for part in parts if part[0] == kind] for kind in ("input", "const"))
        steps = [part for part in parts if part[0] in CODES]
        register = {part: i for i, part in enumerate([*inputs, *constants, *steps])}
        return RegisterProgram(
            tuple((part[1], int(part[2] is float)) for part in inputs),
            tuple(part[1] for part in constants),
            tuple((CODES[part[0]], register[part[1]], register[part[-1]]) for part in steps),
            tuple(register[expression] for expression in expressions),
        )
