"""Proves which words of a graph are computed from numbers, and computes them for a launch.

Each capture of a region traces its numbers (`traced`), with other values in the second one. `settle` compares the two:
the same parameters must be the same expressions, and each must have the value of its expression in both captures. Then
the second graph gets the values of the first there, so that the proof of the pointers finds them equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.expressions import evaluate, inputs_of, pack, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import Escaped
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode, NumberSlot


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_overlay._inductor.relaunch.numbers.launches import Use


def another(value: Any) -> Any:
    """Return another number of the same type, for a second capture."""
    if type(value) is int:
        return value + 1 if value != (1 << 31) - 1 else value - 1
    changed = value + 1.0
    return changed if changed - value == 1.0 else 0.5


def settle(
    uses: tuple[Sequence[Use], Sequence[Use]],
    numbers: tuple[Mapping[int, Any], Mapping[int, Any]],
    graphs: tuple[CapturedGraph, CapturedGraph],
) -> tuple[CapturedGraph, tuple[NumberSlot, ...]]:
    """Return the second of two captured graphs, with the words of the first where numbers differ, and the slots of
    these words. `numbers`: the values of the traced inputs in each capture. Raises `Escaped` if a word is not what its
    expression says."""
    every = frozenset(numbers[0])
    index_of = [{node.handle: node.index for node in graph.nodes} for graph in graphs]
    found = [
        [NumberSlot(index[use.handle], *use[1:]) for use in some if use.handle in index]
        for some, index in zip(uses, index_of)
    ]
    if found[0] != found[1] or len(found[0]) != len(uses[0]):
        raise Escaped(every, "two captures compute other parameters from it")
    for given, graph in zip(numbers, graphs):
        for slot in found[0]:
            node = graph.nodes[slot.node]
            parameters = node.parameters if isinstance(node, KernelNode) else ()
            try:
                expected = pack(slot.letter, evaluate(slot.expression, given))
            except Unfit as error:
                raise Escaped(inputs_of([slot.expression]), str(error)) from None
            if slot.parameter >= len(parameters) or parameters[slot.parameter][1] != expected:
                raise Escaped(inputs_of([slot.expression]), f"a parameter of {node.name} is not what was computed")
    nodes = list(graphs[1].nodes)
    for slot in found[0]:
        node = nodes[slot.node]
        assert isinstance(node, KernelNode)
        values = list(node.parameters)
        values[slot.parameter] = graphs[0].nodes[slot.node].parameters[slot.parameter]
        nodes[slot.node] = dataclasses.replace(node, parameters=tuple(values))
    return dataclasses.replace(graphs[1], nodes=tuple(nodes)), tuple(found[0])


def values_of(slots: Sequence[NumberSlot], inputs: Any) -> list[bytes]:
    """Return the bytes of each slot for these inputs. Raises `Unfit`."""
    return [pack(slot.letter, evaluate(slot.expression, inputs)) for slot in slots]
