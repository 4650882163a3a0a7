"""Expressions in the form that the C module runs (`csrc/numbers.c`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.expressions import OPERATIONS, parts_of, TYPES


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.numbers.expressions import Expression

CODES = {name: number for number, name in enumerate(OPERATIONS)}  # as in the C source
LETTERS = "".join(TYPES)  # a type's place here is its number in the C source


class Result(int):
    """The number of a program's result, in a place where a launch takes the result: in a size, a stride, an offset."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Result and int(self) == int(other)

    def __hash__(self) -> int:
        return hash((Result, int(self)))

    def __repr__(self) -> str:
        return f"Result({int(self)})"


@dataclass(frozen=True)
class Program:
    """Expressions as one list of operations on registers: first those of the inputs, then those of the constants, then
    one for the result of each operation. Types are 0 for integers and 1 for floats."""

    inputs: tuple[tuple[int, int], ...]  # (position, type)
    constants: tuple[tuple[int, Any], ...]  # (type, value)
    code: tuple[tuple[int, int, int], ...]  # (operation, register, register)
    results: tuple[int, ...]  # the register of each expression

    @staticmethod
    def of(expressions: Sequence[Expression], others: Sequence[Expression] = ()) -> Program:
        """`others`: expressions for which numbers have to fit, too, and which are no results."""
        parts = dict.fromkeys(part for expression in (*expressions, *others) for part in parts_of(expression))
        inputs, constants = ([part for part in parts if part[0] == kind] for kind in ("input", "const"))
        steps = [part for part in parts if part[0] in CODES]
        register = {part: i for i, part in enumerate([*inputs, *constants, *steps])}
        return Program(
            tuple((part[1], int(part[2] is float)) for part in inputs),
            tuple((int(type(part[1]) is float), part[1]) for part in constants),
            tuple((CODES[part[0]], register[part[1]], register[part[-1]]) for part in steps),
            tuple(register[expression] for expression in expressions),
        )
