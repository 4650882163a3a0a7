"""Which values the elements of a view come from, against labels that are sent through the same operations."""

import operator
import sys

import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.memory import writers_of_elements


aten = torch.ops.aten
SELECTING = ("slice", "select", "transpose", "t", "alias")


class Values:
    """A graph of views and updates. A value that is computed is full of its own number."""

    def __init__(self):
        self.graph = torch.fx.Graph()
        self.computed = {}

    def compute(self, *shape):
        number = len(self.computed)
        node = self.graph.call_function(aten.full.default, (shape, number))
        node.meta["val"] = torch.full(shape, number)
        self.computed[number] = node
        return node

    def apply(self, target, *args):
        node = self.graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        node.meta["val"] = target(*values)
        return node

    def labels(self, node):
        return {self.computed[n] for n in node.meta["val"].unique().tolist()}


def drawn_slice(draw, size):
    start = draw(st.integers(-size - 1, size + 1))
    stop = draw(st.one_of(st.integers(-size, size + 2), st.just(sys.maxsize)))
    return start, stop, draw(st.integers(1, 4))


@st.composite
def programs(draw):
    """The values, and the one at the end of a chain of views and updates."""
    values = Values()
    node = values.compute(draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    for _ in range(draw(st.integers(1, 5))):
        shape = node.meta["val"].shape
        kind = draw(st.sampled_from((*SELECTING, "update", "update_row", "flat", "split", "chunk")))
        if not shape or 0 in shape:
            break
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        if kind == "slice":
            node = values.apply(aten.slice.Tensor, node, dim, *drawn_slice(draw, shape[dim]))
        elif kind == "select":
            node = values.apply(aten.select.int, node, dim, draw(st.integers(-shape[dim], shape[dim] - 1)))
        elif kind == "transpose":
            node = values.apply(aten.transpose.int, node, dim, draw(st.integers(0, len(shape) - 1)))
        elif kind == "t" and len(shape) <= 2:
            node = values.apply(aten.t.default, node)
        elif kind == "update":
            where = drawn_slice(draw, shape[dim])
            part = aten.slice.Tensor(node.meta["val"], dim, *where)
            node = values.apply(aten.slice_scatter.default, node, values.compute(*part.shape), dim, *where)
        elif kind == "update_row":
            index = draw(st.integers(-shape[dim], shape[dim] - 1))
            part = aten.select.int(node.meta["val"], dim, index)
            node = values.apply(aten.select_scatter.default, node, values.compute(*part.shape), dim, index)
        elif kind == "flat" and node.meta["val"].is_contiguous():
            node = values.apply(aten.view.default, node, [-1])
        elif kind == "split" and node.meta["val"].is_contiguous():
            dim %= len(shape)
            inner = draw(st.sampled_from([n for n in range(1, shape[dim] + 1) if not shape[dim] % n]))
            node = values.apply(aten.view.default, node, [*shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :]])
        elif kind == "chunk":
            parts = values.apply(aten.split.Tensor, node, draw(st.integers(1, shape[dim])), dim)
            node = values.apply(operator.getitem, parts, 0)
        else:
            node = values.apply(aten.alias.default, node)
    return values, node


class TestSources(TestCase):
    @given(programs())
    @settings(max_examples=400, deadline=None)
    def test_none_is_missing_nor_added_without_notice(self, drawn):
        values, node = drawn
        found, labels = writers_of_elements(node), values.labels(node)
        self.assertLessEqual(labels, found)
        if labels and None not in found and len(values.computed) < 3:  # of several updates, some are written over
            self.assertEqual(labels, found)

    def test_what_an_update_left_alone(self):
        values = Values()
        base, update = values.compute(8, 8), values.compute(8, 4)
        new = values.apply(aten.slice_scatter.default, base, update, 1, 0, sys.maxsize, 2)
        for index in range(8):
            column = values.apply(aten.slice.Tensor, new, 1, index, index + 1)
            self.assertEqual(writers_of_elements(column), {base if index % 2 else update})
            row = values.apply(aten.select.int, values.apply(aten.t.default, new), 0, index)
            self.assertEqual(writers_of_elements(row), {base if index % 2 else update})
        self.assertEqual(writers_of_elements(new), {base, update})

    def test_update_of_a_view_of_a_view(self):
        """v[1:][:, ::2].add_(...)"""
        values = Values()
        base, update = values.compute(8, 8), values.compute(7, 4)
        rows = values.apply(aten.slice.Tensor, base, 0, 1, sys.maxsize)
        inner = values.apply(aten.slice_scatter.default, rows, update, 1, 0, sys.maxsize, 2)
        new = values.apply(aten.slice_scatter.default, base, inner, 0, 1, sys.maxsize)
        first = values.apply(aten.select.int, new, 0, 0)
        odd = values.apply(aten.slice.Tensor, new, 1, 5, 6)
        even = values.apply(aten.slice.Tensor, values.apply(aten.slice.Tensor, new, 0, 3, 5), 1, 4, 5)
        self.assertEqual([writers_of_elements(v) for v in (first, odd, even)], [{base}, {base}, {update}])

    def test_halves_of_a_split_dimension(self):
        """v[3:9].add_(...); v.unflatten(0, (2, 16))[1]"""
        values = Values()
        base, update = values.compute(32, 32), values.compute(6, 32)
        new = values.apply(aten.slice_scatter.default, base, update, 0, 3, 9)
        split = values.apply(aten.view.default, new, [2, 16, 32])
        halves = [values.apply(aten.select.int, split, 0, i) for i in range(2)]
        self.assertEqual([writers_of_elements(half) for half in halves], [{base, update}, {base}])
        column = values.apply(aten.select.int, split, 1, 9)
        self.assertEqual(writers_of_elements(column), {base, update, None})  # its rows are not in one distance

    def test_rows_that_meet_nowhere(self):
        values = Values()
        base, update = values.compute(30), values.compute(5)
        new = values.apply(aten.slice_scatter.default, base, update, 0, 1, 30, 6)
        for start in range(6):
            part = values.apply(aten.slice.Tensor, new, 0, start, 30, 9)
            self.assertEqual(writers_of_elements(part), values.labels(part))

    def test_unknown_sizes_take_all(self):
        values = Values()
        base, update = values.compute(8, 8), values.compute(8, 4)
        new = values.apply(aten.slice_scatter.default, base, update, 1, 0, sys.maxsize, 2)
        column = values.apply(aten.slice.Tensor, new, 1, 5, 6)
        del column.meta["val"]
        self.assertEqual(writers_of_elements(column), {base, update, None})
        flat = values.apply(aten.view.default, new, [64])
        self.assertEqual(writers_of_elements(flat), {base, update})
        self.assertEqual(writers_of_elements(values.apply(aten.slice.Tensor, flat, 0, 1, 2)), {base, update, None})
        diagonal = values.apply(aten.diagonal.default, new, 1)
        self.assertEqual(writers_of_elements(diagonal), {base, update, None})
