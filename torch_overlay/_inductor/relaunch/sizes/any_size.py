"""Arranges a graph that serves any size: a launch computes all that depends on the sizes.

Note [Graphs for any size]
Generated code computes what its Triton kernels get, and what it allocates, from the region's sizes in plain Python. So
if a region launches nothing but such kernels, two captures show a graph for every size. Each traces the sizes
(`numbers`), in calls of different sizes that the region was called with. Both must launch the same kernels, with the
same expressions for parameters, grids, offsets and allocations, and every one of these must have the value of its
expression. What is left must be equal, or a pointer: that is the proof of any capture.

A launch evaluates the expressions: number slots, grids, sizes of what it allocates, and *derived regions*, which begin
at an offset in another region that depends on the sizes. Scratch allocations are derived regions of the scratch slab.
They can't be packed at each launch, so they share bins: no two allocations of a bin are in use at the same time, and a
bin is as large as its largest allocation. Where code decides by a size (`if`, a loop), the graph is for the sizes with
the same outcome. Other sizes, and regions that call libraries, get graphs by size: Note [Sizes that share an
executable] of `sizes`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NoReturn, TYPE_CHECKING

from torch_overlay._inductor.relaunch.memory.arrange import Arrangement
from torch_overlay._inductor.relaunch.memory.outputs import Computed, Empty, OfInput, OfStorage, Sized
from torch_overlay._inductor.relaunch.memory.packing import aligned, Order
from torch_overlay._inductor.relaunch.numbers.expressions import constant, evaluate, Expression, OPERATIONS, Result
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped, slots_of, Traced, with_numbers_of
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode, PointerSlot, Template


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from torch_overlay._inductor.relaunch.capture.capture import Captured
    from torch_overlay._inductor.relaunch.memory.outputs import TensorView
    from torch_overlay._inductor.relaunch.numbers.launches import Dims, Shapes
    from torch_overlay._inductor.relaunch.proof.nodes import NumberSlot

MOST_SCRATCH = 64  # allocations


@dataclass(frozen=True)
class Seen:
    """A call that a region has seen: its numbers, and how its tensors lay in their memory, by position."""

    numbers: Mapping[int, Any]
    views: Mapping[int, TensorView]


def arrange_any_size(
    first: Captured, second: Captured, graphs: Sequence[CapturedGraph], prove: Callable[..., Template]
) -> tuple[Arrangement, Sized]:
    """Return the arrangement of two captures of different sizes. Raises `NumberEscaped` or `Unprovable` if there is no
    graph for any size. `prove` proves the pointers of two graphs."""
    a, b = graphs
    for captured, graph in ((first, a), (second, b)):
        if (other := next((n for n in graph.nodes if n.handle not in captured.launches.handles), None)) is not None:
            _escape(f"{other.name} is no Triton kernel that generated code launches")
    numbers, offsets = _numbers(first, a), _offsets(first, a)
    ours, theirs = _trace(first, numbers, offsets), _trace(second, _numbers(second, b), _offsets(second, b))
    if differ := [what for what in ours if ours[what] != theirs[what]]:
        _escape(f"two calls of different sizes differ in {', '.join(differ)}")
    a, b = _based(a, offsets, first.numbers), _based(b, offsets, second.numbers)
    template = prove((a, with_numbers_of(b, a, numbers) if len(a.nodes) == len(b.nodes) else b))
    return _Arranger(first, second, template, a.edges, numbers, offsets).arrangement()


def _escape(how: str) -> NoReturn:
    raise NumberEscaped(frozenset(), how)


def _shapes(captured: Captured) -> Shapes:
    assert captured.launches.shapes is not None
    return captured.launches.shapes


def _numbers(captured: Captured, graph: CapturedGraph) -> tuple[NumberSlot, ...]:
    return slots_of(captured.launches.uses, captured.numbers, graph)


def _offsets(captured: Captured, graph: CapturedGraph) -> dict[tuple[int, int], Expression]:
    """Return where in their regions parameters point, by node and parameter, if that depends on the sizes."""
    index_of = {node.handle: node.index for node in graph.nodes}
    return {(index_of[o.handle], o.parameter): o.expression for o in captured.launches.offsets}


def _trace(captured: Captured, numbers: Any, offsets: Any) -> dict[str, Any]:
    """Return what a capture computed, in a form in which captures of different sizes are equal."""
    shapes = _shapes(captured)
    tensors = [_form(dims) for dims in (*shapes.allocations.values(), *shapes.outputs)]
    recipes = [
        r.storage if isinstance(r, OfStorage) else type(r) if isinstance(r, (OfInput, Empty)) else r
        for r in captured.layout.recipes
    ]
    return {
        "what kernels get": numbers,
        "where kernels read and write": offsets,
        "decisions": list(shapes.decisions),
        "what they allocate": (tensors, len(captured.lives)),
        "what they return": (recipes, captured.places),
    }


def _form(dims: Dims | None) -> Any:
    if dims is None:
        return None
    numbers = (*dims.size, None, *dims.stride, None, dims.offset)
    return dims.dtype, list(map(_plain_or_expression, numbers))


def _based(
    graph: CapturedGraph, offsets: Mapping[tuple[int, int], Expression], numbers: Mapping[int, Any]
) -> CapturedGraph:
    """Return the graph with the start of its region where a parameter points to a place that depends on the sizes."""
    nodes = list(graph.nodes)
    for (index, parameter), expression in offsets.items():
        node = nodes[index]
        assert isinstance(node, KernelNode)
        values = list(node.parameters)
        at, value = values[parameter]
        moved = int.from_bytes(value, "little") - evaluate(expression, numbers)
        values[parameter] = at, moved.to_bytes(len(value), "little")
        nodes[index] = dataclasses.replace(node, parameters=tuple(values))
    return dataclasses.replace(graph, nodes=tuple(nodes))


class _Arranger:
    def __init__(
        self,
        first: Captured,
        second: Captured,
        template: Template,
        edges: tuple[tuple[int, int], ...],
        numbers: tuple[NumberSlot, ...],
        offsets: Mapping[tuple[int, int], Expression],
    ) -> None:
        self.captured, self.template, self.edges, self.numbers, self.offsets = first, template, edges, numbers, offsets
        self.shapes, self.layout = _shapes(first), first.layout
        self.lives = [x.either(y) for x, y in zip(first.lives, second.lives, strict=True)]
        self.results: dict[Expression, Result] = {}
        self.derived: dict[tuple[int, Result], int] = {}  # -> region

    def arrangement(self) -> tuple[Arrangement, Sized]:
        layout = self.layout
        for expression in self.shapes.decisions:
            self._result(expression)
        inputs = len(layout.inputs)
        allocated = [self._dims(inputs + i) for i in range(len(layout.own))]
        allocations = tuple([(self._tuple(d.size), self._tuple(d.stride), d.dtype) for d in allocated])
        outputs = dict(self._outputs({number: d.dtype for number, d in zip(layout.own, allocated)}))
        places, scratch = self._pack()
        slots = [self._placed(slot, places) for slot in self.template.slots]
        size = scratch if isinstance(scratch, int) else evaluate(scratch, self.captured.numbers)
        layout = dataclasses.replace(layout, scratch=(size,) if places else ())
        regions = layout.scratch_region + 1 + len(self.derived)
        template = Template(regions, self.template.nodes, tuple(slots), self.numbers)
        total = None if isinstance(scratch, int) else self._result(scratch)
        sized = Sized(tuple(self.results), allocations, outputs, total, tuple(self.derived))
        return Arrangement(layout, template), sized

    def _dims(self, region: int) -> Dims:
        """Return how generated code allocates a region."""
        dims = self.shapes.allocations.get(self.captured.segments[region].address)
        if dims is None:
            _escape("memory that generated code does not allocate")
        return dims

    def _result(self, expression: Expression) -> Result:
        return self.results.setdefault(expression, Result(len(self.numbers) + len(self.results)))

    def _tuple(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self._result(v.expression) if isinstance(v, Traced) else v for v in values])

    def _outputs(self, types: Mapping[int, torch.dtype]) -> Iterator[tuple[int, Any]]:
        for i, recipe in enumerate(self.layout.recipes):
            if isinstance(recipe, Computed):
                if type(evaluate(recipe.expression, self.captured.numbers)) is not int:
                    _escape("an output that is a float is computed")
                yield i, self._result(recipe.expression)
            elif isinstance(recipe, OfStorage):
                dims = self.shapes.outputs[i]
                if dims is None or dims.dtype != types[recipe.storage]:
                    _escape("an output is no view that generated code makes of what it allocates")
                yield i, (self._tuple(dims.size), self._tuple(dims.stride), *self._tuple([dims.offset]))
            elif isinstance(recipe, (OfInput, Empty)):
                _escape("an output is a view of an input, or empty")

    def _pack(self) -> tuple[dict[int, Any], Any]:
        """Return where each scratch allocation begins in the slab, and the bytes of all: integers or expressions."""
        graph = self.template
        scratch = range(len(self.captured.places), len(self.lives))
        order = Order(len(graph.nodes), self.edges, self.lives, [(slot.node, slot.region) for slot in graph.slots])
        used = [p for p in scratch if order.holders[p] and self.lives[p].size]
        if len(used) > MOST_SCRATCH:
            _escape(f"it makes {len(used)} scratch allocations")
        bins: list[list[int]] = []
        for p in sorted(used, key=lambda p: -self.lives[p].size):
            shared = next((each for each in bins if all(order.clear(p, q) for q in each)), None)
            if shared is None:
                bins.append([p])
            else:
                shared.append(p)
        places: dict[int, Any] = {}
        end: Any = 0
        for members in bins:
            places |= dict.fromkeys(members, end)
            sizes = dict.fromkeys(_plain_or_expression(aligned(self._dims(p).bytes())) for p in members)
            size, *others = sizes
            for other in others:
                size = _combined("max", size, other)
            end = _combined("add", end, size)
        return places, end

    def _placed(self, slot: PointerSlot, places: Mapping[int, Any]) -> PointerSlot:
        region = slot.region
        begin = self.offsets.get((slot.node, slot.parameter), 0)
        if region >= len(self.captured.places):
            region, begin = self.layout.scratch_region, _combined("add", places[region], begin)
        if isinstance(begin, int):
            return slot._replace(region=region, delta=slot.delta + begin)
        place = region, self._result(begin)
        return slot._replace(region=self.derived.setdefault(place, self.layout.scratch_region + 1 + len(self.derived)))


def _plain_or_expression(value: Any) -> Any:
    return value.expression if isinstance(value, Traced) else value


def _combined(name: str, a: Any, b: Any) -> Any:
    """Return the integer, or the expression, that an operation makes of two such."""
    if isinstance(a, int) and isinstance(b, int):
        return OPERATIONS[name](a, b)
    if name == "add" and 0 in (a, b):
        return b if a == 0 else a
    return name, *[constant(v) if isinstance(v, int) else v for v in (a, b)]
