"""Proves which words of a graph are computed from numbers, and computes them for a launch.

Each capture of a region traces its numbers (`traced`), with other values in the second one. The same parameters must be
the same expressions in both, and each must have the value of its expression (`slots_of`). Then the second graph gets
the values of the first there (`settled`), so that the proof of the pointers finds them equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.expressions import evaluate, Expression, inputs_of, pack, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import Escaped
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode, NumberSlot


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Use(NamedTuple):
    """A parameter of a node that is an expression of numbers, or a dimension of its grid, with the numbers and letters
    of a `NumberSlot`."""

    handle: int
    parameter: int
    letter: str
    expression: Expression


def another(value: Any) -> Any:
    """Return another number of the same type, for a second capture."""
    if type(value) is int:
        return value + 1 if value != (1 << 31) - 1 else value - 1
    changed = value + 1.0
    return changed if changed - value == 1.0 else 0.5


def slots_of(uses: Sequence[Use], numbers: Mapping[int, Any], graph: CapturedGraph) -> tuple[NumberSlot, ...]:
    """Return the number slots of a captured graph. `numbers`: the values of the traced inputs in the capture. Raises
    `Escaped` if a parameter is not what its expression says."""
    index_of = {node.handle: node.index for node in graph.nodes} if uses else {}
    found = []
    for use in uses:
        if (index := index_of.get(use.handle)) is None:
            raise Escaped(inputs_of([use.expression]), "a kernel that gets it is not in the graph")
        slot = NumberSlot(index, *use[1:])
        node = graph.nodes[index]
        try:
            expected = pack(slot.letter, evaluate(slot.expression, numbers))
        except Unfit as error:
            raise Escaped(inputs_of([slot.expression]), str(error)) from None
        if not isinstance(node, KernelNode) or _held(node, slot) != expected:
            raise Escaped(inputs_of([slot.expression]), f"a parameter of {node.name} is not what was computed")
        found.append(slot)
    return tuple(found)


def _held(node: KernelNode, slot: NumberSlot) -> bytes | None:
    if slot.parameter < 0:
        return pack(slot.letter, node.grid[-1 - slot.parameter])
    return node.parameters[slot.parameter][1] if slot.parameter < len(node.parameters) else None


def settled(graph: CapturedGraph, like: CapturedGraph, slots: Sequence[NumberSlot]) -> CapturedGraph:
    """Return the graph with the parameters of another one where number slots are: for the proof, they are equal."""
    nodes = list(graph.nodes)
    for slot in slots:
        node, other = nodes[slot.node], like.nodes[slot.node]
        assert isinstance(node, KernelNode) and isinstance(other, KernelNode)
        if slot.parameter < 0:
            x, y, z = (
                theirs if axis == -1 - slot.parameter else ours
                for axis, (ours, theirs) in enumerate(zip(node.grid, other.grid))
            )
            nodes[slot.node] = dataclasses.replace(node, grid=(x, y, z))
            continue
        values = list(node.parameters)
        values[slot.parameter] = other.parameters[slot.parameter]
        nodes[slot.node] = dataclasses.replace(node, parameters=tuple(values))
    return dataclasses.replace(graph, nodes=tuple(nodes))


def values_of(slots: Sequence[NumberSlot], inputs: Any, others: Sequence[Expression] = ()) -> list[bytes]:
    """Return the bytes of each slot for these inputs. Raises `Unfit`, for the `others`, too."""
    for expression in others:
        evaluate(expression, inputs)
    return [pack(slot.letter, evaluate(slot.expression, inputs)) for slot in slots]
