"""Which elements a kernel that Inductor generated loads and stores, from its source.

    x0 = (xindex % 32)
    x1 = xindex // 32
    tl.store(out_ptr0 + (128 + x0 + 64*x1), tmp0, xmask)

stores 16 rows of 32 elements, every second one, from element 128 on, if `xnumel` is 512. Indices that are sums of
multiples of such variables are understood, and numbers that the kernel is called with. The masks of such a variable's
end are not looked at: what is found may be more than what is touched. A parameter that is used in any other way, under
a condition, through an index from memory or by a template, may be touched everywhere.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping

_GENERATED = re.compile(r"@triton_heuristics\.(?:pointwise|reduction|persistent_reduction|cooperative_reduction)\(")
_ACCESS = re.compile(r"tl\.(load|store)\((\w+) \+ \((.*?)\)(?:, (.*)|\))$", re.MULTILINE)
_CONDITION = re.compile(r"\btmp\d")
_DEFINED = re.compile(r"^ +(\w+) = (.+?) *$", re.MULTILINE)
_INDEX = re.compile(r"([xyz]|r\d*_)index")


class _NotLinear(Exception):
    """The index isn't a sum of multiples of variables."""


@dataclass(frozen=True)
class Elements:
    """`sizes[i]` steps of `strides[i]` elements, `offset` elements from where the argument begins."""

    offset: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.offset + other.offset, self.sizes + other.sizes, self.strides + other.strides)

    def __mul__(self, factor: int) -> Elements:
        return Elements(self.offset * factor, self.sizes, tuple(s * factor for s in self.strides))

    def size(self) -> int:
        """Of a variable that counts from 0."""
        if self.offset or self.strides != (1,):
            raise _NotLinear
        return self.sizes[0]

    def number(self) -> int:
        if self.sizes:
            raise _NotLinear
        return self.offset


def _counts(size: int) -> Elements:
    return Elements(0, (size,), (1,))


class KernelRanges:
    """What a kernel's parameters are used for; nothing is known of kernels that Inductor didn't generate."""

    def __init__(self, source: str) -> None:
        self.accesses: dict[str, dict[str, list[str]]] = {}  # parameter -> "load" or "store" -> indices
        self.definitions: dict[str, str | None] = {}
        if not _GENERATED.search(source):
            return
        body = source.partition("@triton.jit")[2].partition("):\n")[2]
        for name, text in _DEFINED.findall(body):
            self.definitions[name] = text if self.definitions.get(name, text) == text else None
        for kind, parameter, index, rest in _ACCESS.findall(body):
            mask = rest if kind == "load" else rest.partition(", ")[2]  # after what is stored
            if not _CONDITION.search(mask):
                self.accesses.setdefault(parameter, {}).setdefault(kind, []).append(index)
        for parameter, indices in list(self.accesses.items()):
            if len(re.findall(rf"\b{parameter}\b", body)) != sum(map(len, indices.values())):
                del self.accesses[parameter]

    def of(self, parameter: str, kind: str, numbers: Mapping[str, int]) -> list[Elements] | None:
        """What a call that is given these numbers loads or stores (`kind`); None: it may be everything."""
        if (known_uses := self.accesses.get(parameter)) is None:
            return None
        known: dict[str, Elements] = {name: Elements(n) for name, n in numbers.items()}
        try:
            found = [self._read(_parsed(index), known) for index in known_uses.get(kind, ())]
        except (_NotLinear, SyntaxError, RecursionError):
            return None
        return None if any(e.offset < 0 or min(e.strides, default=0) < 0 for e in found) else found

    def _value(self, name: str, known: dict[str, Elements]) -> Elements:
        text = self.definitions.get(name, "" if name in known else None)
        if text is None:
            raise _NotLinear
        if text:
            index = _INDEX.fullmatch(name)
            known[name] = (
                _counts(self._value(f"{index[1]}numel", known).number())
                if index and ("tl.arange" in text or "offset + " in text)
                else self._read(_parsed(text), known)
            )
        return known[name]

    def _read(self, node: ast.expr, known: dict[str, Elements]) -> Elements:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Elements(node.value)
        if isinstance(node, ast.Name):
            return self._value(node.id, known)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._read(node.operand, known) * -1
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # of a single element
            if node.func.attr == "broadcast_to":
                return self._read(node.func.value, known)
            if node.func.attr == "full" and len(node.args) > 1:
                return self._read(node.args[1], known)
        if not isinstance(node, ast.BinOp):
            raise _NotLinear
        left, right = self._read(node.left, known), self._read(node.right, known)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left + right * -1
        if isinstance(node.op, ast.Mult):
            return right * left.offset if not left.sizes else left * right.number()
        if isinstance(node.op, ast.FloorDiv) and right.number() > 0:
            return _counts(-(-left.size() // right.offset))
        if isinstance(node.op, ast.Mod) and right.number() > 0:
            return _counts(min(left.size(), right.offset))
        raise _NotLinear


@functools.lru_cache(4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


__all__ = ["Elements", "KernelRanges"]
