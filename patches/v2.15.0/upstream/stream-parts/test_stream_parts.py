# Owner(s): ["module: inductor"]

import itertools
import random

import torch
from torch._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, register
from torch._inductor.streams.parts import Access, accesses, parts, Span, span_of
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten


def elements(span):
    indices = itertools.product(*(range(size) for size, _ in span.dims))
    return {
        span.offset + sum(i * stride for i, (_, stride) in zip(index, span.dims))
        for index in indices
    }


def draw(rng):
    strides = (1, 2, 3, 4, 6, 8, 12)
    dims = [(rng.randrange(2, 5), rng.choice(strides)) for _ in range(rng.randrange(4))]
    return Span(rng.randrange(13), tuple(dims))


class TestSpans(TestCase):
    def test_what_is_said_of_drawn_spans(self):
        rng, disjoint, inside = random.Random(0), 0, 0
        for _ in range(5000):
            one, other = draw(rng), draw(rng)
            ours, theirs = elements(one), elements(other)
            self.assertEqual(one.last, max(ours))
            self.assertGreaterEqual(one.count, len(ours))
            if one.is_dense:
                self.assertEqual(ours, set(range(one.offset, one.last + 1)))
            if one.is_disjoint(other):
                disjoint += 1
                self.assertFalse(ours & theirs, (one, other))
            if one.contains(other):
                inside += 1
                self.assertLessEqual(theirs, ours, (one, other))
            self.assertEqual(one.is_disjoint(other), other.is_disjoint(one))
        self.assertGreater(disjoint, 500)
        self.assertGreater(inside, 50)

    def test_rows_columns_and_elements_in_turns(self):
        rows = Span(0, ((4, 8), (8, 1))), Span(32, ((4, 8), (8, 1)))
        columns = Span(0, ((8, 8), (3, 1))), Span(3, ((8, 8), (5, 1)))
        turns = Span(0, ((16, 2),)), Span(1, ((16, 2),))
        blocks = Span(0, ((2, 16), (4, 2))), Span(8, ((2, 16), (4, 1)))
        for one, other in (rows, columns, turns, blocks):
            self.assertTrue(one.is_disjoint(other))
        self.assertFalse(
            Span(0, ((8, 8), (4, 1))).is_disjoint(Span(3, ((8, 8), (5, 1))))
        )

    def test_dense_spans_have_what_is_between(self):
        for dims in (
            (),
            ((4, 1),),
            ((2, 1), (3, 2)),
            ((4, 8), (8, 1)),
            ((3, 2), (3, 1)),
        ):
            span = Span(0, dims)
            self.assertTrue(span.is_dense, dims)
            self.assertTrue(span.contains(Span(0, ())))
            self.assertFalse(span.contains(Span(span.last, ((2, 1),))))
            self.assertTrue(span.contains(Span(span.last, ())))
        for dims in (((4, 2),), ((2, 3), (2, 1))):
            self.assertFalse(Span(0, dims).is_dense)
            self.assertTrue(Span(0, dims).contains(Span(0, dims)))

    def test_what_is_no_span(self):
        self.assertIsNone(span_of(0, [4], [-1]))
        self.assertIsNone(span_of(-1, [4], [1]))
        self.assertIsNone(span_of(0, ["s0"], [1]))
        self.assertIsNone(span_of(0, [0], [1]))
        self.assertEqual(span_of(2, [4, 1, 3], [3, 7, 0]), Span(2, ((4, 3),)))


class TestParts(TestCase):
    def test_accesses_that_overlap_have_a_part_in_common(self):
        rng, seen = random.Random(0), 0
        for _ in range(3000):
            known = [
                (draw(rng) if rng.randrange(8) else None, rng.random() < 0.5)
                for _ in range(rng.randrange(2, 7))
            ]
            written = [span for span, writes in known if writes]
            numbers = parts([span for span, _ in known], written)
            if numbers is None:
                continue
            for i, j in itertools.combinations(range(len(known)), 2):
                (one, writes), (other, also) = known[i], known[j]
                if not (writes or also):
                    continue
                overlap = None in (one, other) or elements(one) & elements(other)
                if overlap:
                    seen += 1
                    self.assertTrue(numbers[i] & numbers[j], known)
        self.assertGreater(seen, 500)

    def test_rows_that_are_written_and_read(self):
        top, bottom, both = (Span(at, ((n, 1),)) for at, n in ((0, 3), (4, 4), (2, 5)))
        found = parts([top, bottom, None], [top, bottom])
        self.assertEqual(found, [{1}, {2}, {0, 1, 2}])
        # What both writes may touch is in neither part.
        found = parts([top, bottom, both], [top, bottom, both])
        self.assertEqual(found, [{1}, {2}, {0, 1, 2}])

    def test_writes_that_overlap_one_another(self):
        small, wide, other = (Span(at, ((n, 1),)) for at, n in ((0, 4), (0, 8), (8, 9)))
        inside = Span(5, ((2, 1),))
        found = parts([small, wide, inside, other], [small, wide, other])
        self.assertEqual(found, [{1}, {1}, {1}, {2}])

    def test_read_beside_what_is_written(self):
        first, second, third = (Span(at, ((4, 1),)) for at in (0, 4, 8))
        self.assertEqual(parts([first, second, third], [first]), [{1}, {0}, {0}])

    def test_nothing_to_tell_apart(self):
        self.assertIsNone(parts([None, None], [None]))
        self.assertIsNone(parts([Span(0, ((4, 1),)), None], [Span(0, ((4, 1),))]))
        self.assertIsNone(parts([], []))


class TestAccesses(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()

    def found(self, *results):
        """The accesses of each node."""
        self.program.output(*results)
        with self.program.scheduled() as scheduler:

            def storage(name):
                return scheduler.mutation_real_name.get(name, name)

            return [set(accesses(node, storage)) for node in scheduler.nodes]

    def test_index_of_a_kernel(self):
        x = self.program.input(8, 4)
        rows = self.program.call(aten.slice.Tensor, x, 0, 2, 6)
        column = self.program.call(aten.select.int, x, 1, 3)
        results = [self.program.call(aten.sin.default, n) for n in (rows, column)]
        wanted = [
            {
                Access("buf0", Span(0, ((16, 1),)), True),
                Access("x0", Span(8, ((16, 1),)), False),
            },
            {
                Access("buf1", Span(0, ((8, 1),)), True),
                Access("x0", Span(3, ((8, 4),)), False),
            },
        ]
        self.assertEqual(self.found(*results), wanted)

    def test_index_that_is_computed(self):
        x = self.program.input(8)
        index = self.program.input(4, dtype=torch.int64)
        (found,) = self.found(self.program.call(aten.index.Tensor, x, [index]))
        self.assertIn(Access("x0", None, False), found)
        self.assertIn(Access("x1", Span(0, ((4, 1),)), False), found)

    def test_update_in_place(self):
        x, y = self.program.input(8), self.program.input(8)
        y = self.program.call(aten.sin.default, y)
        (found,) = self.found(self.program.call(aten.copy_.default, x, y))
        whole = Span(0, ((8, 1),))
        self.assertEqual(found, {Access("x0", whole, True), Access("x1", whole, False)})

    def test_views_that_a_library_takes(self):
        x, y = self.program.input(8, 8), self.program.input(8, 4)
        rows = self.program.call(aten.slice.Tensor, x, 0, 4, 8)
        (found,) = self.found(self.program.call(aten.mm.default, rows, y))
        wanted = {
            Access("buf0", None, True),
            Access("x0", Span(32, ((4, 8), (8, 1))), False),
            Access("x1", None, False),
        }
        self.assertEqual(found, wanted)

    def test_copy_that_does_not_block_the_host(self):
        register()
        host, y = self.program.input(4, 8, device="cpu"), self.program.input(16)
        part = self.program.call(aten.slice.Tensor, y, 0, 8, 16)
        with self.program.mode:
            row = host.meta["val"][2]
        copy = self.program.call(COPY_ASYNC, host, part)
        copy.meta[DESTINATION] = row
        (found,) = self.found()
        wanted = {
            Access("x0", Span(16, ((8, 1),)), True),
            Access("x1", Span(8, ((8, 1),)), False),
        }
        self.assertEqual(found, wanted)

    def test_operator_that_says_only_what_it_updates(self):
        x, y = self.program.input(8), self.program.input(8)
        node = self.program.call(torch.ops.test_stream_parts.add_.default, x, y)
        (found,) = self.found()
        self.assertIn(Access("x0", None, True), found)
        self.assertIn(Access("x1", None, False), found)
        self.assertIsNone(node.meta["val"])


@torch.library.custom_op("test_stream_parts::add_", mutates_args=("x",))
def add_(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@add_.register_fake
def _(x, y):
    return None


if __name__ == "__main__":
    run_tests()
