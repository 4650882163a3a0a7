"""Random stream programs, and the programs that random ones have shrunk to.

`TestDrawn` draws programs with hypothesis, compiles them on a simulated GPU and checks what comes out; one that fails
is shrunk and printed. `tools/fuzz` does the same for as many as one wants, on a GPU, too. `TestFound` keeps what was
found: each program was compiled wrong once.
"""

import dataclasses
import unittest
import unittest.mock

from hypothesis import given, HealthCheck, Phase, settings
from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stream_programs.drawn import checked, found
from stream_programs.drawn.kit import as_program
from stream_programs.drawn.order import CURRENT, HOST, Order, Storage
from stream_programs.drawn.steps import random_spec, Spec, specs
from stream_programs.drawn.trial import as_test, COMPILED, judge, shrink, Verdict
from stream_programs.drawn.unwritten import unwritten
from stream_programs.drawn.writer import write
from torch_overlay.analysis.race_check.race_report import Promise, Report
from torch_overlay.analysis.race_check.trace import Memory, Trace


# The patched form repeats what the overlay form has shown: that it compiles the same.
EXAMPLES = 40 if form.PATCHED else 160


@instantiate_parametrized_tests
class TestDrawn(TestCase):
    @form.slow
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def test_ordered_as_eager_is(self, spec: Spec) -> None:
        written = write(spec)
        verdict = judge(written, ["default"], on_gpu=False)
        self.assertIsNone(verdict, f"{written.text}\n{verdict and verdict.text}")

    @parametrize("number", form.sampled(range(20), 5))
    def test_under_cuda_graphs(self, number: int) -> None:
        written = write(random_spec(1, number))
        verdict = judge(written, ["reduce-overhead"], on_gpu=False)
        self.assertIsNone(verdict, f"{written.text}\n{verdict and verdict.text}")

    @parametrize("number", form.sampled(range(40), 5))
    def test_with_more_operators(self, number: int) -> None:
        written = write(random_spec(1, number, wide=True))
        verdict = judge(written, ["default"], on_gpu=False)
        self.assertIsNone(verdict, f"{written.text}\n{verdict and verdict.text}")


class TestGenerator(TestCase):
    def test_views_by_call_complex_numbers_lists_and_out_are_drawn(self) -> None:
        texts = [write(random_spec(2, number)).text for number in range(300)]
        words = (
            "permute",
            "unbind",
            ".split(",
            "view(torch.int32)",
            "view_as_complex",
            "view_as_real",
            ".real",
            ".imag",
        )
        for word in (*words, ".conj()", "_foreach_add(", "_foreach_sub_(", "both(", "out="):
            self.assertGreater(sum(word in text for text in texts), 2, word)

    def test_complex_inputs_begin_where_their_view_may(self) -> None:
        """A misaligned input that is viewed as complex lies an even number of elements off, any other an odd one."""
        drawn = [write(dataclasses.replace(random_spec(2, number), misaligned=True)) for number in range(300)]
        offsets = {w.misaligned for w in drawn if "view_as_complex" in w.text and not w.random}
        self.assertEqual((offsets, {w.misaligned for w in drawn if w.random} <= {0}), ({2}, True))

    def test_a_stream_that_waited_for_nothing_must(self) -> None:
        order = Order(1)
        made = Storage(CURRENT, 1.0)
        order.launch(CURRENT, [], [made])
        self.assertEqual(order.missing(1, [made], []), {CURRENT: 2})
        order.wait_stream(1, CURRENT)
        self.assertEqual(order.missing(1, [made], []), {})

    def test_memory_that_was_freed_is_handed_on_behind_its_readers(self) -> None:
        order = Order(2)
        for stream in (1, 2):
            order.wait_stream(stream, CURRENT)
        made = Storage(1, 1.0)
        order.launch(1, [], [made])
        order.wait_stream(2, 1)
        order.launch(2, [made], [])
        order.free(made)
        self.assertEqual(order.missing(1, [], [], allocates=True), {2: 1})
        self.assertEqual(order.missing(2, [], [], allocates=True), {})

    def test_what_the_host_waited_for_orders_what_is_launched_later(self) -> None:
        order = Order(1)
        made = Storage(CURRENT, 1.0)
        order.launch(CURRENT, [], [made])
        order.wait_stream(HOST, CURRENT)
        self.assertEqual(order.missing(1, [made], []), {})

    def test_what_a_loader_fills_is_recorded_and_waited_for(self) -> None:
        steps = (("record_stream", 0, 3, 0), ("compute", 1, 3, 2))
        written = write(Spec(1, steps=steps, misaligned=True, loader=1))
        lines = [line.strip() for line in written.text.splitlines()]
        start = lines.index("x.record_stream(current)")
        self.assertEqual(lines[start + 1 : start + 3], ["current.wait_stream(s1)", "v1 = x + 1"])
        self.assertEqual(lines[-1], "return calls(k, fn, loads=(s1, [0]))")
        verdict = judge(written, ["default", "reduce-overhead"], on_gpu=False)
        self.assertIsNone(verdict, verdict and verdict.text)

    def test_what_one_stream_allocates_is_filled_by_another(self) -> None:
        written = write(Spec(1, steps=(("fill", 0, 0, 0),)))
        lines = [line.strip() for line in written.text.splitlines()]
        filled = lines.index("scaled_into(v1, buffer.contiguous(), 2)")
        self.assertLess(lines.index('v1 = torch.empty(32, 32, device="cuda")'), filled)
        self.assertEqual(lines[filled - 2 : filled], ["with torch.cuda.stream(s1):", "s1.wait_stream(current)"])
        verdict = judge(written, ["default", "reduce-overhead"], on_gpu=False)
        self.assertIsNone(verdict, verdict and verdict.text)

    def test_a_program_that_races_in_eager_is_no_fair_question(self) -> None:
        fair = found.PROGRAMS["scatter_that_a_pass_makes_anew"]
        racy = fair.text.replace("s1.wait_stream(current)", "pass")
        self.assertNotEqual(racy, fair.text)
        verdict = judge(dataclasses.replace(fair, text=racy), ["default"], on_gpu=False)
        self.assertEqual(verdict and verdict.kind, "invalid")

    def test_memory_that_nobody_has_written_is_read(self) -> None:
        trace = Trace()
        given = Memory("x", 64, "s0")  # whose allocation is not in the trace
        made = trace.alloc("made", 64, on="s0")
        trace.launch("half", "s0", reads=[given], writes=[made[0:32]])
        trace.launch("early", "s0", reads=[made])
        trace.launch("update", "s0", reads=[made[32:64]], writes=[made[32:64]])
        trace.launch("late", "s0", reads=[made])
        self.assertEqual(unwritten(trace.operations), ["early reads 32 bytes of made that nobody has written"])

    def test_a_part_may_be_overwritten_while_another_part_is_read(self) -> None:
        """Kernels of one fused program read tensors as wholes."""
        trace = Trace()
        whole = trace.alloc("x", 64, on="s0")
        trace.boundary("call 0", whole, whole[0:32])
        report = Report([], [], traces=[trace])
        self.assertEqual(checked._parts(report), {("call 0", str(whole[0:32]))})
        report.boundary += [Promise("call 0", str(v), "overwrite", "s1", True, False) for v in (whole, whole[0:32])]
        self.assertEqual(checked.findings(report), [("lost", "after call 0, s1 may overwrite x")])

    def test_a_failure_becomes_a_test(self) -> None:
        written = write(random_spec(0, 3))
        text = as_test(written, Verdict("race", "default", 'RAW: "a" and \\ b'), "seed 0", "drawn_0_3", False)
        scope: dict[str, object] = {"__file__": __file__, "__name__": "drawn"}
        exec(compile(text, __file__, "exec"), scope)
        scope["test_drawn_0_3"]()  # type: ignore[operator]

    def test_a_failure_keeps_the_code_that_failed(self) -> None:
        def fails(*args: object, **kwargs: object) -> None:
            compiles(*args, **kwargs)
            raise checked.Wrong("race", "made up")

        compiles, written = checked.check_compiled, write(random_spec(0, 3))
        with unittest.mock.patch.object(checked, "check_compiled", fails):
            verdict = judge(written, ["default"], on_gpu=False)
        assert verdict is not None
        self.assertEqual(verdict.text, "made up")
        self.assertIn("def call(", verdict.code)

    def test_shrinking_keeps_the_fault(self) -> None:
        from stream_programs.drawn import trial

        spec = next(s for n in range(100) if "add_to" in write(s := random_spec(0, n)).text)

        def fake(written: object, modes: object, on_gpu: bool, seeds: int = 5) -> Verdict | None:
            return Verdict("race", "default", "RAW") if "add_to" in written.text else None  # type: ignore[attr-defined]

        verdict = fake(write(spec), [], False)
        assert verdict is not None
        with unittest.mock.patch.object(trial, "judge", fake):
            small, same = shrink(spec, verdict, False, seconds=20)
        self.assertEqual(same.fault, verdict.fault)
        self.assertIn("add_to", write(small).text)
        self.assertLess(len(small.steps), 4)


@instantiate_parametrized_tests
class TestFound(TestCase):
    @parametrize("name", form.sampled(list(found.PROGRAMS), 31))
    def test_is_ordered(self, name: str) -> None:
        for mode in COMPILED:
            verdict = judge(found.PROGRAMS[name], [mode], on_gpu=False)
            self.assertIsNone(verdict, f"{mode}\n{found.PROGRAMS[name].text}\n{verdict and verdict.text}")


@form.needs_gpu
@instantiate_parametrized_tests
class TestGpu(TestCase):
    @parametrize("name", list(found.PROGRAMS))
    def test_equals_ordered_eager(self, name: str) -> None:
        from stream_programs.drawn.on_gpu import check_mode

        for mode in COMPILED:
            check_mode(as_program(found.PROGRAMS[name], name), mode, seeds=5)
