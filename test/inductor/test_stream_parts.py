"""Accesses to parts of one buffer: which are provably disjoint, and the plans that follow from it."""

import itertools

import corpus
from hypothesis import given, settings, strategies as st
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401
from stream_programs import by_name, PROGRAMS
from torch_overlay._inductor.streams.parts import ElementSpan, parts, span_of


def elements(span: ElementSpan) -> set[int]:
    indices = itertools.product(*(range(size) for size, _ in span.dims))
    return {span.offset + sum(i * stride for i, (_, stride) in zip(index, span.dims)) for index in indices}


spans = st.builds(
    ElementSpan,
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(2, 4), st.sampled_from([1, 2, 3, 4, 6, 8, 12])), max_size=3).map(tuple),
)


class TestSpans(TestCase):
    @settings(max_examples=500, deadline=None)
    @given(spans, spans)
    def test_what_is_called_disjoint_is(self, one, other):
        if one.is_disjoint(other):
            self.assertEqual(elements(one) & elements(other), set())
        if one.contains(other):
            self.assertLessEqual(elements(other), elements(one))
        self.assertEqual(one.is_disjoint(other), other.is_disjoint(one))

    def test_rows_columns_and_elements_in_turns_are_disjoint(self):
        rows = ElementSpan(0, ((4, 8), (8, 1))), ElementSpan(32, ((4, 8), (8, 1)))
        columns = ElementSpan(0, ((8, 8), (3, 1))), ElementSpan(3, ((8, 8), (5, 1)))
        turns = ElementSpan(0, ((16, 2),)), ElementSpan(1, ((16, 2),))
        blocks = ElementSpan(0, ((2, 16), (4, 2))), ElementSpan(8, ((2, 16), (4, 1)))
        for one, other in (rows, columns, turns, blocks):
            self.assertTrue(one.is_disjoint(other))
        self.assertFalse(ElementSpan(0, ((8, 8), (4, 1))).is_disjoint(ElementSpan(3, ((8, 8), (5, 1)))))

    def test_symbols_and_negative_strides_are_no_span(self):
        self.assertIsNone(span_of(0, [4], [-1]))
        self.assertIsNone(span_of(0, ["s0"], [1]))
        self.assertIsNone(span_of(0, [0], [1]))
        self.assertEqual(span_of(2, [4, 1, 3], [3, 7, 0]), ElementSpan(2, ((4, 3),)))

    @settings(max_examples=500, deadline=None)
    @given(st.lists(st.tuples(st.one_of(st.none(), spans), st.booleans()), min_size=2, max_size=6))
    def test_accesses_that_overlap_have_a_part_in_common(self, accesses):
        numbers = parts([span for span, _ in accesses], [span for span, writes in accesses if writes])
        for i, j in itertools.combinations(range(len(accesses)), 2) if numbers is not None else ():
            (one, writes), (other, also) = accesses[i], accesses[j]
            overlap = one is None or other is None or elements(one) & elements(other)
            if (writes or also) and overlap:
                self.assertTrue(numbers[i] & numbers[j], accesses)


@instantiate_parametrized_tests
class TestPlansOfParts(TestCase):
    def compiled(self, name: str):
        return corpus.compile_program(by_name(name))[0]

    def test_no_stream_waits_for_a_write_to_another_part(self):
        for name, sides in (
            ("rows_of_an_argument", 2),
            ("chunks_of_own_buffer", 4),
            ("columns_of_an_argument", 2),
            ("elements_in_turns", 2),
        ):
            with self.subTest(name):
                (plan,) = self.compiled(name).plans
                between = [
                    (event.stream, stream)
                    for event in plan.events
                    for _, stream in event.waits
                    if event.stream > 0 and stream > 0 and event.after >= 0
                ]
                self.assertEqual(between, [])
                self.assertEqual(len({op.stream for op in plan.ops if op.stream}), sides)

    def test_the_second_of_two_writes_that_overlap_waits(self):
        (plan,) = self.compiled("overlapping_rows").plans
        waits = [(event.stream, stream) for event in plan.events for _, stream in event.waits if event.after >= 0]
        self.assertIn((1, 2), waits)

    def test_nothing_is_copied_but_the_parts(self):
        """A library's kernel writes its result into the part; no new tensor of the whole size is made."""
        code = self.compiled("chunks_of_own_buffer").wrappers[0]
        self.assertEqual(code.count("empty_strided_cuda((64, 64)"), 1)
        self.assertEqual(code.count("empty_strided_cuda("), 1)
        self.assertEqual(code.count("out=reinterpret_tensor("), 4)
        code = self.compiled("rows_of_an_argument").wrappers[0]
        self.assertNotIn("empty_strided_cuda((64, 64)", code)

    @parametrize("name", [p.name for p in PROGRAMS if p.group == "parts"])
    def test_misaligned_inputs_are_written_in_parts(self, name: str) -> None:
        """No stream writes back an aligned copy over what another stream writes."""
        for mode in (None, "reduce-overhead"):
            report = corpus.check_program(by_name(name), mode, misaligned=True)
            self.assertEqual(corpus.findings(report), [], str(report))
