# Owner(s): ["module: aotdispatch"]

import random
import sys

import torch
from torch._functorch._streams.view_sources import sources
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten
END = sys.maxsize


class Values:
    """A graph of views and updates. What is computed is full of its own number."""

    def __init__(self):
        self.graph = torch.fx.Graph()
        self.computed = []

    def compute(self, *shape):
        number = len(self.computed)
        node = self.graph.call_function(aten.full.default, (shape, number))
        node.meta["val"] = torch.full(shape, number)
        self.computed.append(node)
        return node

    def apply(self, target, *args):
        node = self.graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        node.meta["val"] = target(*values)
        return node

    def slice(self, base, dim, start, stop, step=1):
        return self.apply(aten.slice.Tensor, base, dim, start, stop, step)

    def update(self, base, dim, start, stop, step=1):
        """Return the base with a part that is computed anew, and that part."""
        shape = aten.slice.Tensor(base.meta["val"], dim, start, stop, step).shape
        part, where = self.compute(*shape), (dim, start, stop, step)
        return self.apply(aten.slice_scatter.default, base, part, *where), part

    def found_in(self, node):
        return {self.computed[n] for n in node.meta["val"].unique().tolist()}


def draw(rng):
    """The values, and the one at the end of a chain of views and updates."""
    values = Values()
    node = values.compute(rng.randrange(1, 8), rng.randrange(1, 8))
    for _ in range(rng.randrange(1, 6)):
        shape = node.meta["val"].shape
        if not shape or 0 in shape:
            break
        dim = rng.randrange(-len(shape), len(shape))
        size, whole = shape[dim], node.meta["val"].is_contiguous()
        start = rng.randrange(-size - 1, size + 2)
        stop = rng.choice((END, rng.randrange(-size, size + 3)))
        where, index = (start, stop, rng.randrange(1, 5)), rng.randrange(-size, size)
        kind = rng.randrange(8)
        if kind == 0:
            node = values.slice(node, dim, *where)
        elif kind == 1:
            node = values.apply(aten.select.int, node, dim, index)
        elif kind == 2:
            other = rng.randrange(len(shape))
            node = values.apply(aten.transpose.int, node, dim, other)
        elif kind == 3:
            order = rng.sample(range(len(shape)), len(shape))
            node = values.apply(aten.permute.default, node, order)
        elif kind == 4:
            node, _ = values.update(node, dim, *where)
        elif kind == 5:
            part = aten.select.int(node.meta["val"], dim, index)
            made = values.compute(*part.shape)
            node = values.apply(aten.select_scatter.default, node, made, dim, index)
        elif kind == 6 and whole:
            node = values.apply(aten.view.default, node, [-1])
        elif kind == 7 and whole:
            dim %= len(shape)
            inner = rng.choice([n for n in range(1, size + 1) if size % n == 0])
            split = [*shape[:dim], size // inner, inner, *shape[dim + 1 :]]
            node = values.apply(aten.view.default, node, split)
    return values, node


class TestSources(TestCase):
    def test_none_is_missing_and_most_are_exact(self):
        rng, exact, several = random.Random(0), 0, 0
        for _ in range(2000):
            values, node = draw(rng)
            found, wanted = sources(node), values.found_in(node)
            self.assertLessEqual(wanted, found, str(values.graph))
            exact += found == wanted
            several += len(values.computed) > 1
        self.assertGreater(exact, 1600)
        self.assertGreater(several, 500)

    def test_what_an_update_left_alone(self):
        values = Values()
        base = values.compute(8, 8)
        new, update = values.update(base, 1, 0, END, 2)
        for index in range(8):
            wanted = {base if index % 2 else update}
            column = values.slice(new, 1, index, index + 1)
            self.assertEqual(sources(column), wanted)
            rows = values.apply(aten.t.default, new)
            self.assertEqual(
                sources(values.apply(aten.select.int, rows, 0, index)), wanted
            )
        self.assertEqual(sources(new), {base, update})

    def test_update_of_a_view_of_a_view(self):
        """v[1:][:, ::2].add_(...)"""
        values = Values()
        base = values.compute(8, 8)
        inner, update = values.update(values.slice(base, 0, 1, END), 1, 0, END, 2)
        new = values.apply(aten.slice_scatter.default, base, inner, 0, 1, END)
        first = values.apply(aten.select.int, new, 0, 0)
        odd = values.slice(new, 1, 5, 6)
        even = values.slice(values.slice(new, 0, 3, 5), 1, 4, 5)
        found = [sources(v) for v in (first, odd, even)]
        self.assertEqual(found, [{base}, {base}, {update}])

    def test_halves_of_a_split_dimension(self):
        """v[3:9].add_(...); v.unflatten(0, (2, 16))[1]"""
        values = Values()
        base = values.compute(32, 32)
        new, update = values.update(base, 0, 3, 9)
        split = values.apply(aten.view.default, new, [2, 16, 32])
        halves = [values.apply(aten.select.int, split, 0, i) for i in range(2)]
        self.assertEqual([sources(half) for half in halves], [{base, update}, {base}])

    def test_rows_that_meet_nowhere(self):
        values = Values()
        new, _ = values.update(values.compute(30), 0, 1, 30, 6)
        for start in range(6):
            part = values.slice(new, 0, start, 30, 9)
            self.assertEqual(sources(part), values.found_in(part))

    def test_unknown_sizes_take_all(self):
        values = Values()
        base = values.compute(8, 8)
        new, update = values.update(base, 1, 0, END, 2)
        flat = values.apply(aten.view.default, new, [64])
        self.assertEqual(sources(values.slice(flat, 0, 1, 2)), {base, update})
        column = values.slice(new, 1, 5, 6)
        del base.meta["val"]
        self.assertEqual(sources(new), {base, update})
        del column.meta["val"]
        self.assertEqual(sources(column), {column})


if __name__ == "__main__":
    run_tests()
