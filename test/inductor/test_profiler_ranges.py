"""Profiles name calls of compiled code, launches of graphs and blocks on side streams, where the option asks for it."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from host_graphs import host_graphs
from profiler_traces import Event, is_within, ranges, traced, tree, work_of
from torch._inductor.test_case import TestCase

import form
import prefetch_loop
from stand_ins.relaunch_case import ADD, GpuTestCase, RelaunchTestCase, SQUARES
from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch.launch.relaunch import Misaligned
from torch_overlay.analysis import check
from torch_overlay.testing import compile_only, simulated_gpu


class Nvtx:
    """Takes the place of torch.cuda.nvtx: `seen` has the pushes, indented by their depth."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.depth = self.calls = 0

    def range_push(self, name: str) -> None:
        self.seen.append("  " * self.depth + name)
        self.depth += 1
        self.calls += 1

    def range_pop(self) -> None:
        self.depth -= 1
        self.calls += 1


def replaced(case: Any) -> Nvtx:
    nvtx = Nvtx()
    for name in ("range_push", "range_pop"):
        case.enterContext(mock.patch.object(torch.cuda.nvtx, name, getattr(nvtx, name)))
    return nvtx


class TestRange(TestCase):
    def test_range_that_generated_code_left_open_is_closed(self) -> None:
        nvtx = replaced(self)

        def fails(inputs: Any) -> None:
            profiler_ranges.push("inner")
            raise ZeroDivisionError

        profiler_ranges.push("around")
        with self.assertRaises(ZeroDivisionError):
            profiler_ranges.within("outer", fails)([])
        self.assertEqual((nvtx.seen, nvtx.depth), (["around", "  outer", "    inner"], 1))
        profiler_ranges.pop()

    def test_function_without_a_name_is_left_as_it_is(self) -> None:
        self.assertIs(profiler_ranges.within("", len), len)


class TestLaunches(RelaunchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.nvtx = replaced(self)

    def calls(self, run: Any, times: int) -> list[str]:
        """Names of the ranges in these calls, each with other weights."""
        before = len(self.nvtx.seen)
        for _ in range(times):
            self.add(run)
        self.assertEqual(self.nvtx.depth, 0)
        return self.nvtx.seen[before:]

    def named(self, source: str = ADD, nvtx: bool | None = True, **options: Any) -> Any:
        with config.patch(nvtx=nvtx):
            return self.runner(source, **options)

    def test_launch_names_its_region_and_the_nodes(self) -> None:
        for options in ({}, {"static": [1]}, {"verify": True}):  # static inputs keep moving here
            run = self.named(**options)  # type: ignore[arg-type]
            self.assertEqual(self.calls(run, 1), [])  # no graph yet
            self.assertEqual(self.calls(run, 7), ["a region, graph of 2 nodes"] * 7)

    def test_range_ends_when_the_launch_raises(self) -> None:
        run = self.named()
        self.calls(run, 2)
        x, w = torch.randn(17)[1:].view(4, 4), torch.randn(4, 4)
        (state,) = run.states.values()
        with self.assertRaises(Misaligned):
            state.relaunch.launch([x, w])
        self.assertEqual((len(self.nvtx.seen), self.nvtx.depth), (2, 0))
        self.assertEqual(run([x, w])[0], x * w + x)
        self.assertEqual(self.nvtx.depth, 0)

    def test_stages_have_their_numbers(self) -> None:
        self.cut_into_stages()
        run = self.named(SQUARES, is_backward=True)
        for _ in range(3):
            made = run([*[torch.full((512,), float(k), dtype=torch.float64) for k in range(6)], 512])
            self.assertEqual([float(t[0]) for t in made], [25, 16, 9, 4, 1, 0])
        stages = len(self.device.arrangements[-1].stages)
        self.assertGreater(stages, 1)
        names = [name.rpartition(", graph of ")[0] for name in self.nvtx.seen]
        self.assertEqual(names, [f"a region, stage {i} of {stages}" for i in range(1, stages + 1)] * 2)

    def test_nothing_is_called_without_the_option(self) -> None:
        for value in (None, False):
            with config.patch(nvtx=value), mock.patch.object(profiler_ranges, "push", side_effect=AssertionError):
                self.calls(self.runner(ADD), 4)
        self.assertEqual(self.nvtx.calls, 0)

    def test_launch_without_the_option_is_that_of_the_c_module(self) -> None:
        for value, is_named in ((None, False), (True, True)):
            run = self.named(nvtx=value)
            self.calls(run, 3)
            ((state,), try_launch) = run.states.values(), run.states.try_launch
            self.assertEqual(try_launch != state.relaunch.call.try_launch, is_named)


class TestPrograms(TestCase):
    """Whole programs with graphs on the host."""

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        self.enterContext(host_graphs())

    def profile(self, run: Callable[[], Any]) -> list[str]:
        """Names of the ranges of a call in the profiler's trace, indented by their depth."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run()
        return tree(traced(profiler))

    def test_training_step_in_a_trace(self) -> None:
        x = torch.randn(4, 4, requires_grad=True)

        @torch.compile
        def fn(x: torch.Tensor) -> torch.Tensor:
            return (x @ x).sin().sum()

        with config.patch(nvtx=True):
            for _ in range(3):
                fn(x).backward()
        names = self.profile(lambda: fn(x).backward())
        self.assertEqual(
            [name.rpartition(" of ")[0] if "graph" in name else name for name in names],
            [
                "forward of compiled frame 0/0",
                "  forward of compiled frame 0/0, graph",
                "backward of compiled frame 0/0",
                "  backward of compiled frame 0/0, graph",
            ],
        )

    def test_partitions_in_a_trace(self) -> None:
        @torch.compile
        def fn(x: torch.Tensor) -> torch.Tensor:
            return x.sin().erfinv().cos()

        with torch.no_grad(), config.patch(nvtx=True):
            with inductor_config.patch(custom_should_partition_ops=["aten::erfinv"]):
                for _ in range(3):
                    fn(torch.rand(4))
            names = self.profile(lambda: fn(torch.rand(4)))
        frame = "inference of compiled frame 0/0"
        parts = [(f"  {frame}, partition {i}", f"    {frame}, partition {i}, graph of 1 node") for i in (0, 1)]
        self.assertEqual(names, [frame, *parts[0], *parts[1]])

    def test_code_that_asks_for_no_graph(self) -> None:
        @torch.compile(options={"triton.cudagraphs": False})
        def fn(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        with torch.no_grad(), config.patch(nvtx=True):
            fn(torch.rand(4))
            self.assertEqual(self.profile(lambda: fn(torch.rand(4))), ["inference of compiled frame 0/0"])

    def test_no_range_without_the_option(self) -> None:
        @torch.compile
        def fn(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        nvtx = replaced(self)
        for _ in range(3):
            fn(torch.rand(4))
        self.assertEqual((self.profile(lambda: fn(torch.rand(4))), nvtx.calls), ([], 0))


def program() -> Callable[..., Any]:
    side = torch.cuda.Stream()

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = torch.relu(x @ w)
            with torch.cuda.nvtx.range("mine"):
                b = a @ w
            c = b @ x
        d = torch.tanh(w @ x)
        current.wait_stream(side)
        return c + d

    return fn


def counted_from(fn: Callable[..., Any], text: str) -> str:
    """The text with the numbers of lines as counted from the function's first."""
    first = fn.__code__.co_firstlineno
    return re.sub(r"py:(\d+)", lambda match: f"py:{int(match[1]) - first}", text)


class TestSideStreams(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()

    def lines(self, nvtx: bool, **options: Any) -> list[str]:
        """Launches and ranges in generated code."""
        with simulated_gpu(), config.patch(nvtx=nvtx, fold_branches_below_us=0.0):
            fn, x = program(), torch.randn(512, 512, device="cuda")
            (text,) = compile_only(fn, x, x, **options).wrappers
        text = counted_from(fn, text.partition("def call(")[2])
        return re.findall(r"profiler_ranges\.\w+\(.*\)|nvtx\.\w+\(.*\)|kernels\.\w+|triton\w+(?=\.run)", text)

    def test_block_has_the_line_where_it_begins(self) -> None:
        """... and a range of the program's nests."""
        self.assertExpectedInline(
            "\n".join(self.lines(True)),
            """\
profiler_ranges.push('side stream 1: test_profiler_ranges.py:4')
kernels.mm
triton_poi_fused_relu_0
profiler_ranges.pop()
nvtx.range_push('mine')
profiler_ranges.push('side stream 1: test_profiler_ranges.py:6')
kernels.mm
profiler_ranges.pop()
nvtx.range_pop()
kernels.mm
profiler_ranges.push('side stream 1: test_profiler_ranges.py:7')
kernels.mm
profiler_ranges.pop()
triton_poi_fused_add_tanh_1""",
        )

    def test_code_without_the_option_has_none(self) -> None:
        self.assertEqual([line for line in self.lines(False) if "range" in line], [])

    def test_code_that_is_captured_has_none(self) -> None:
        lines = self.lines(True, mode="reduce-overhead")
        self.assertEqual([line for line in lines if line.startswith("profiler_ranges")], [])

    def test_ranges_of_a_training_step_in_their_order(self) -> None:
        """As the code runs on the simulated device, backward included."""
        nvtx = replaced(self)
        with simulated_gpu(), config.patch(nvtx=True, fold_branches_below_us=0.0):
            fn, x = program(), torch.randn(512, 512, device="cuda", requires_grad=True)
            found = check(fn, x, x, calls=1, backward=True, eager=False, misaligned=False)
        self.assertTrue(found.ok, found)
        self.assertEqual(nvtx.depth, 0)
        self.assertExpectedInline(
            counted_from(fn, "\n".join(nvtx.seen)),
            """\
forward of compiled frame 0/0
  side stream 1: test_profiler_ranges.py:4
  mine
    side stream 1: test_profiler_ranges.py:6
  side stream 1: test_profiler_ranges.py:7
backward of compiled frame 0/0
  side stream 1: test_profiler_ranges.py:7
  side stream 1: test_profiler_ranges.py:6""",
        )


@form.needs_gpu
class TestOnAGpu(GpuTestCase):
    """The prefetch loop of the examples, small."""

    def trace(self, mode: str | None) -> tuple[list[Event], int]:
        """Events of a second run of the loop, and its steps."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with mock.patch.multiple(prefetch_loop, BATCH=64, FEATURES=256), config.patch(nvtx=True):
            step = prefetch_loop.make_step(prefetch_loop.make_model(), torch.cuda.Stream())
            batches = prefetch_loop.PinnedBatches(torch.randn(8 * 64, 256), 64)
            compiled = torch.compile(step, fullgraph=True, mode=mode)
            prefetch_loop.run_loop(compiled, batches)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=activities) as profiler:
                scores = prefetch_loop.run_loop(compiled, batches)
                torch.cuda.synchronize()
        return traced(profiler), len(scores)

    def test_kernels_of_each_launch_are_within_its_range(self) -> None:
        events, steps = self.trace("reduce-overhead")
        shown = ranges(events)
        calls = [e for e in shown if re.fullmatch(r"inference of compiled frame \S+", e["name"])]
        launches = [e for e in shown if re.search(r", graph of \d+ nodes?$", e["name"])]
        self.assertEqual(len(calls), steps)
        self.assertGreaterEqual(len(launches), steps)
        for launch in launches:
            self.assertTrue(any(is_within(launch, call) for call in calls), launch)
            self.assertTrue(any(e["cat"] == "kernel" for e in work_of(events, launch)), launch)

    def test_copy_of_the_next_batch_is_within_the_range_of_its_stream(self) -> None:
        events, steps = self.trace(None)
        blocks = [e for e in ranges(events) if re.match(r"side stream \d+: prefetch_loop\.py:\d+", e["name"])]
        self.assertEqual(len(blocks), steps)
        for block in blocks:
            self.assertEqual([e["cat"] for e in work_of(events, block)], ["gpu_memcpy"], block)
