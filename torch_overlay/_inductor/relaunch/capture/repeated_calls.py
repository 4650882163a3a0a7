"""Adds the nodes of library calls that a capture has left out, for they repeat earlier ones.

A deep model calls a library with the same shapes in each of its layers, and these calls take most of the time of a
capture. A call that is like an earlier one (`library_calls.LibraryCalls`) would launch the nodes of that one, with its
own tensors in the place of its tensors. So it is not made. Once it is known where the nodes of the earlier one hold
pointers, they are copied. A pointer into a tensor of the earlier call becomes one into the same argument of the call
that was left out. Any other pointer, into a workspace, stays, and the workspace lives on until then. A workspace and a
tensor may lie in one region, which is a segment of the allocator's: then no call can be left out.

This gives the nodes, but no graph of the driver's, so nothing can be instantiated. The nodes are numbered as those of
an executable that there is, or are launched one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from torch_overlay._inductor.relaunch.capture.library_calls import Differs, places_of
from torch_overlay._inductor.relaunch.proof.nodes import PointerSlot
from torch_overlay._inductor.relaunch.proof.prove import AddressMap
from torch_overlay.orders import only_order


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.capture import Captured
    from torch_overlay._inductor.relaunch.capture.library_calls import Repeat
    from torch_overlay._inductor.relaunch.memory.packing import Life
    from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, Node, Template


def order_of(graph: CapturedGraph) -> tuple[int, ...]:
    """Return the graph's nodes in the order of the stream; raise Differs if it was captured on several."""
    order = only_order(len(graph.nodes), graph.edges)
    if order is None:
        raise Differs("its nodes may run side by side")
    return order


def with_repeats(
    captured: Captured, graph: CapturedGraph, template: Template, numbers_of: Callable[[Sequence[Node]], Sequence[int]]
) -> tuple[CapturedGraph, Template, list[Life]]:
    """Return the graph, the template and the lives of a capture, with the nodes of the calls that it has left out.
    `numbers_of` numbers all nodes, which it gets in the order of the stream, or returns nothing. Raises Differs."""
    order = order_of(graph)
    sources: list[tuple[int, Repeat | None]] = []  # of each node: the node that it is, or a copy of
    done = 0
    for repeat in captured.repeats:
        sources += [(node, None) for node in order[done : repeat.at]]
        sources += [(order[place], repeat) for place in captured.calls[repeat.like].nodes]
        done = repeat.at
    sources += [(node, None) for node in order[done:]]
    copies = itertools.count(len(graph.nodes))
    numbers = numbers_of([template.nodes[source] for source, _ in sources])
    numbers = numbers or [source if repeat is None else next(copies) for source, repeat in sources]
    moves = _Moves(captured, graph)
    slots_of: defaultdict[int, list[PointerSlot]] = defaultdict(list)
    for slot in template.slots:
        slots_of[slot.node].append(slot)
    nodes: list[Node] = [graph.nodes[0]] * len(numbers)
    slots: list[PointerSlot] = []
    for number, (source, repeat) in zip(numbers, sources):
        node = template.nodes[source]
        nodes[number] = node if number == source else dataclasses.replace(node, index=number)
        if repeat is not None:
            slots += moves.moved(repeat, number, slots_of[source])
        elif number == source:
            slots += slots_of[source]
        else:
            slots += [PointerSlot(number, *slot[1:]) for slot in slots_of[source]]
    edges = list(zip(numbers, numbers[1:]))
    # A kernel that need not wait for the whole node before it is launched so by each call.
    early = {after for _, after in graph.partial}
    partial = sorted([edge for edge, (source, _) in zip(edges, sources[1:]) if source in early])
    whole = dataclasses.replace(graph, nodes=tuple(nodes), edges=tuple(sorted(edges)), partial=tuple(partial))
    return whole, dataclasses.replace(template, nodes=whole.nodes, slots=tuple(slots)), moves.lives


class _Moves:
    """Where the tensors of calls lie. `lives`: of all regions, until the last copy of a node has run."""

    def __init__(self, captured: Captured, graph: CapturedGraph) -> None:
        self.calls, self.lives = captured.calls, list(captured.lives)
        self.addresses = AddressMap(graph)
        self.latest: tuple[Repeat | None, Mapping[int, tuple[range, int, int]]] = None, {}

    def moved(self, repeat: Repeat, number: int, slots: Sequence[PointerSlot]) -> Iterator[PointerSlot]:
        """Yield the pointer slots of node `number`, which is a copy of the one that has these slots."""
        moved = self._of(repeat)
        for _, parameter, offset, region, delta in slots:
            if region in moved:
                tensor, new, shift = moved[region]
                if delta not in tensor:
                    raise Differs("a call uses memory beside one of its tensors")
                yield PointerSlot(number, parameter, offset, new, delta + shift)
            else:
                self._keep(region, repeat.time)
                yield PointerSlot(number, parameter, offset, region, delta)

    def _of(self, repeat: Repeat) -> Mapping[int, tuple[range, int, int]]:
        """Return for each region of the earlier call where its tensor lies in it, the region in place of it, and how
        many bytes farther the other tensor lies in that one."""
        if self.latest[0] is not repeat:
            call, found = self.calls[repeat.like], {}
            for place, other in zip(places_of(call.args, call.kwargs), repeat.addresses, strict=True):
                (region, delta), (new, moved) = self._place(place.address), self._place(other)
                if region in found:
                    raise Differs("two tensors of a call share their memory")
                found[region] = range(delta, delta + place.view.extent), new, moved - delta
            self.latest = repeat, found
        return self.latest[1]

    def _place(self, address: int) -> tuple[int, int]:
        places = self.addresses.places(address)
        if len(places) != 1:
            raise Differs("memory of a call is in no region")
        return places[0]

    def _keep(self, region: int, time: int) -> None:
        """Note that a region is used at a time by a call that was left out."""
        life = self.lives[region]
        if life.freed is not None and life.freed <= time:
            self.lives[region] = dataclasses.replace(life, freed=time + 1)
