"""`check` on compiled functions: what it finds, what it says, and the command line."""

import collections
import itertools
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import corpus
import torch
from corpus import forked
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._inductor.test_case import TestCase

import form
from printed import printed
from stream_programs import by_name
from torch_overlay import config
from torch_overlay._cli import commands
from torch_overlay.analysis import check, check_eager, check_wrapper, LostPromiseError, RaceError
from torch_overlay.analysis.race_check.happens_before import analyse
from torch_overlay.analysis.race_check.race_report import Promise, Report
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.simulated_module import CheckError
from torch_overlay.testing import compile_only, simulated_gpu


def on_a_side_stream(work: Any, joins: bool = True, then: Any = lambda found, *args: found, side: Any = None) -> Any:
    """A function that does its work on a side stream, and `then` on the current one what gives its result."""
    side = side or torch.cuda.Stream()

    def fn(*args: Any) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = work(*args)
        if joins:
            torch.cuda.current_stream().wait_stream(side)
        return then(found, *args)

    return fn


def without(pattern: str) -> Any:
    return lambda text: re.sub(pattern, "", text)


def inputs(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 64, device="cuda", **kwargs), torch.randn(64, 64, device="cuda", **kwargs)


class TestCheck(TestCase):
    maxDiff = None

    def clean(self, *args: Any, **kwargs: Any) -> Report:
        report = check(*args, **kwargs)
        self.assertTrue(report.ok, str(report))
        return report

    @simulated_gpu()
    def test_fork_and_join(self) -> None:
        report = self.clean(forked(torch.cuda.Stream()), *inputs(), fullgraph=True)
        self.assertEqual(str(report), "as compiled: no races, no lost promises, no redundant events")
        self.assertIn("exit", report.plan)
        self.assertIn("after call 1, default stream may read output 0", map(str, report.boundary))
        report.raise_if_any()

    def test_what_changes_a_view_touches_no_memory(self) -> None:
        """Nobody waits for the side stream; only what reads its result needs to."""

        def races(read: bool) -> list[str]:
            with simulated_gpu() as gpu, SimulatedDevice(gpu) as device:
                x, _ = inputs()
                with torch.cuda.stream(torch.cuda.Stream()):
                    a = x * 2
                b = torch.empty(0, device="cuda").set_(a.untyped_storage(), 0, a.shape, a.stride())
                b.t_()
                b.unsqueeze_(0)
                if read:
                    b + 1
            found = [r for r in analyse(device.trace.operations).races if "aten.mul" in r.first.launch.name]
            return [f"{r.kind} {r.second.launch.name}" for r in found]

        self.assertEqual(races(read=False), [])
        self.assertEqual(races(read=True), ["RAW aten.add.Tensor"])

    @simulated_gpu()
    def test_memory_without_a_value_promises_none(self) -> None:
        """Compiled code may write to it: it fills a scalar, and copies what was written in part."""

        def scalar(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x[0, 0])

        def in_part(x: torch.Tensor) -> torch.Tensor:
            y = x.new_empty(64)
            y[0] = 1
            return y[1:]

        for work in (scalar, in_part):
            for joins in (True, False):
                report = self.clean(on_a_side_stream(work, joins), inputs()[0])
                promised = "after call 1, default stream may overwrite output 0" in map(str, report.boundary)
                self.assertEqual(promised, joins)

    @simulated_gpu()
    def test_backward(self) -> None:
        report = self.clean(forked(torch.cuda.Stream()), *inputs(requires_grad=True), backward=True, calls=3)
        self.assertIn("after call 3, default stream may read gradient of input 1", map(str, report.boundary))

    @simulated_gpu()
    def test_wait_that_comes_too_late(self) -> None:
        """At the end its stream is behind the caller's work, but a read was not."""

        def later(text: str) -> str:
            text, count = re.subn(
                r"(\n *ev0\.wait_entry\(stream0_raw\))((?s:.*?)\n *extern_kernels\.mm.*)", r"\2\1", text
            )
            self.assertEqual(count, 1)
            return text

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            a = x @ x
            torch.cuda.current_stream().wait_stream(side)
            return a @ w

        side = torch.cuda.Stream()
        self.clean(fn, *inputs())
        report = check(fn, *inputs(), rewrite=later)
        self.assertEqual(list(map(str, report.lost)), ["before call 2, stream 1 may use input 1"], str(report))
        self.assertIn("does not order it: `aten.mm.out` on default stream reads input 1", str(report))

    @config.patch(fold_branches_below_us=0.0)
    @simulated_gpu()
    def test_report_of_a_wait_that_is_missing(self) -> None:
        def without_join(text: str) -> str:
            text, count = re.subn(r"\n *ev1\.wait\(stream0_raw\)", "", text)
            self.assertEqual(count, 1)
            return text

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                a = x @ w
            current.wait_stream(side)
            return a @ w

        side = torch.cuda.Stream()
        report = check(fn, *inputs(), rewrite=without_join, misaligned=False)
        self.assertExpectedInline(
            re.sub(r"py:\d+", "py:N", str(report)).replace(", bytes 0 to 16383", "") + "\n",
            """\
RAW: buf0 is read before it is known to be written
  first   `aten.mm.out` on stream 1 writes buf0  at test_check.py:N: a = x @ w
  second  `aten.mm.out` on default stream reads buf0  at test_check.py:N: return a @ w
  missing: default stream must wait, before `aten.mm.out`, for an event that stream 1 records after `aten.mm.out`
  and 4 more races of the same cause
lost: after call 1, call 2, default stream may overwrite input 0
  the compiled code does not order it: `aten.mm.out` on stream 1 reads input 0  at test_check.py:N: a = x @ w
lost: after call 1, call 2, default stream may overwrite input 1
  the compiled code does not order it: `aten.mm.out` on stream 1 reads input 1  at test_check.py:N: a = x @ w
lost: after call 2, default stream may read the caller's work on stream 1
  the compiled code does not order it: `the caller` on stream 1 writes the caller's work on stream 1
  and 1 more that eager keeps by the same statement
  in eager that is so by test_check.py:N: current.wait_stream(side)
lost: before call 2, stream 1 may use input 1
  the compiled code does not order it: `aten.mm.out` on default stream reads input 1  at test_check.py:N: return a @ w
  in eager that is so
redundant: ev1.record(stream1_raw): nobody waits for it
  wrapper 0, line 73: ev1.record(stream1_raw)
as compiled: 5 races of 1 cause, 7 lost promises, 1 redundant event
""",
        )
        with self.assertRaisesRegex(RaceError, "RAW: buf0 is read before it is known to be written"):
            report.raise_if_any()

    @simulated_gpu()
    def test_input_mutated_on_a_side_stream_that_the_caller_joins(self) -> None:
        report = self.clean(on_a_side_stream(lambda x: x.add_(1), False, lambda *_: None), inputs()[0])
        rows = {str(p): (p.eager, p.compiled) for p in report.boundary}
        self.assertEqual(rows["after call 1, stream 1 may read input 0"], (True, True))
        self.assertNotIn("after call 1, default stream may read input 0", rows)

    @simulated_gpu()
    def test_a_program_that_races_in_eager_is_told_so(self) -> None:
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(side):
                a = x * 2
            return a + 1

        report = check(fn, inputs()[0])
        text = str(report)
        self.assertRegex(text, r"^in eager the function has 3 races of 2 causes of its own:\n  RAW: input 0")
        self.assertRegex(text, r"\nin eager: 3 races of 2 causes; as compiled: 2 races of 1 cause, no lost promises, ")

    @simulated_gpu()
    def test_a_cause_is_listed_once(self) -> None:
        """However many accesses it leaves unordered, in however many turns and calls."""
        side = torch.cuda.Stream()

        def recorded_nowhere(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            total = x
            for turn in range(3):
                with torch.cuda.stream(side):
                    y = x.sin() + turn
                    z = y.cos()
                torch.cuda.current_stream().wait_stream(side)
                total = total + y
                del y, z
            return total

        def forked_once(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            for turn in range(3):
                with torch.cuda.stream(side):
                    y = x.sin() + turn
                torch.cuda.current_stream().wait_stream(side)
                x = x + y
                del y
            return x

        def joined_nowhere(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = x.sin()
                b = x.cos()
            c = a + 1
            return b + c

        def joined_and_forked_nowhere(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = x.sin()
            b = a + 1
            with torch.cuda.stream(side):
                c = b + 1
            return c + 1

        def recorded_nowhere_and_not_joined(x: torch.Tensor) -> torch.Tensor:
            return recorded_nowhere(x) + joined_nowhere(x)

        for fn, causes in (
            (recorded_nowhere, ["y = x.sin() + turn"]),
            (forked_once, ["y = x.sin() + turn"]),
            (joined_nowhere, ["c = a + 1"]),
            (joined_and_forked_nowhere, ["b = a + 1", "c = b + 1", "return c + 1"]),
            (recorded_nowhere_and_not_joined, ["y = x.sin() + turn", "c = a + 1"]),
        ):
            report = check(fn, inputs()[0], misaligned=False)
            second = re.findall(r"^    second .*  at test_check.py:\d+: (.*)", str(report), re.MULTILINE)
            self.assertEqual(second, causes, str(report))
            self.assertGreater(len(report.eager_races), len(causes))

    @simulated_gpu()
    def test_events_that_the_function_keeps_are_no_promise(self) -> None:
        """Those of eager's own run live on in the compiled one."""
        side, kept, ring = torch.cuda.Stream(), [], [torch.cuda.Event() for _ in range(5)]

        def a_log(done: Any) -> None:
            kept.append(done)

        def a_deque(done: Any) -> None:
            recent.append(done)

        def a_cycle(done: Any) -> None:
            holder = {"done": done}
            holder["self"] = holder

        def a_ring(done: Any) -> None:
            ring.append(ring.pop(0))
            ring[0].record()

        recent: collections.deque[Any] = collections.deque(maxlen=3)
        for keep in (a_log, a_deque, a_cycle, a_ring):

            def fn(x: torch.Tensor, keep: Any = keep) -> torch.Tensor:
                current = torch.cuda.current_stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    a = x @ x
                    done = torch.cuda.Event()
                    done.record(side)
                current.wait_event(done)
                keep(done)
                return a + 1

            with self.subTest(keep=keep.__name__):
                self.clean(fn, inputs()[0])

    @simulated_gpu()
    def test_event_of_the_callers_that_is_not_recorded_is_a_lost_promise(self) -> None:
        side, done = torch.cuda.Stream(), torch.cuda.Event()

        def fn(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = x @ x
                done.record(side)
            torch.cuda.current_stream().wait_stream(side)
            return a + 1

        self.clean(fn, inputs()[0])
        report = check(fn, inputs()[0], rewrite=without(r"\n *event\d\.record\(.*\)"))
        self.assertTrue(any(p.who.startswith("event") for p in report.lost), str(report))

    @simulated_gpu()
    def test_current_stream_is_put_back_behind_each_run(self) -> None:
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(side)
            return x @ x + 1

        before = torch.cuda.current_stream()
        report = self.clean(fn, inputs()[0])
        self.assertIn("after call 1, stream 1 may read output 0", map(str, report.boundary))
        self.assertEqual(torch.cuda.current_stream(), before)

    @simulated_gpu()
    def test_blocking_copy_of_a_constant_promises_nothing_to_the_host(self) -> None:
        makers = {
            "factory": lambda: torch.ones(64, 64).cuda(),
            "literal": lambda: torch.tensor([[2.0]]).cuda(),
            "literal on the device": lambda: torch.tensor([[2.0]], device="cuda"),
            "computed": lambda: (torch.ones(64, 64) * 2).to("cuda"),
        }
        for name, make in makers.items():
            with self.subTest(name=name):
                self.clean(lambda x, make=make: x * make(), inputs()[0])

    @simulated_gpu()
    def test_blocking_copy_of_an_input_is_a_promise_to_the_host(self) -> None:
        report = self.clean(lambda x, h: x * (h + 1).cuda(), inputs()[0], torch.ones(64, 64))
        self.assertIn("after call 1, host may read input 0", [str(p) for p in report.boundary if p.eager])

    def test_wait_at_the_end_of_a_backward_that_is_missing(self) -> None:
        """The side stream's memory is read on the current one, and goes back to the side stream."""

        def without_leave(text: str) -> str:
            return text if "tangents_1" not in text else re.sub(r"\n( *)frame0\.leave\(\)", r"\n\1pass", text)

        program = by_name("train_two_branches")
        self.assertTrue(corpus.check_program(program).ok)
        report = corpus.check_program(program, rewrite=without_leave)
        self.assertIn("stream 1 may hand on the free memory of stream 1", [p.text for p in report.lost], str(report))

    @simulated_gpu()
    def test_lost_promises_of_one_statement_come_once(self) -> None:
        side, kept = torch.cuda.Stream(), torch.randn(8, 8, device="cuda")
        events = [torch.cuda.Event() for _ in range(6)]

        def fn(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kept.mul_(2)
                a = x @ x
            torch.cuda.current_stream().wait_stream(side)
            for event in events:
                event.record()
            return a

        without_exit = without(r"\n *ev\d\.wait\(stream0_raw\)")
        with config.patch(fold_branches_below_us=0.0):
            report = check(fn, inputs()[0], rewrite=without_exit, misaligned=False)
        lost = [line for line in str(report).splitlines() if line.startswith("lost:")]
        self.assertGreater(len(report.lost), 2 * len(lost), str(report))
        self.assertRegex(str(report), r"in eager that is so by test_check.py:\d+: .*wait_stream\(side\)")
        self.assertRegex(
            str(report), r"captured tensor \d \(float32\[8, 8\], first used at test_check.py:\d+: kept.mul_"
        )

    def test_lost_promises_are_no_race_error(self) -> None:
        lost = Promise("call 1", "output 0", "read", "s1", True, False, "model.py:3: join()", "`mm` on s2 writes buf0")
        report = Report(boundary=[lost])
        with self.assertRaises(LostPromiseError) as raised:
            report.raise_if_any()
        self.assertExpectedInline(
            str(raised.exception),
            """\
lost: after call 1, s1 may read output 0
  the compiled code does not order it: `mm` on s2 writes buf0
  in eager that is so by model.py:3: join()
1 lost promise, no redundant events""",
        )

    @simulated_gpu()
    def test_memory_of_a_side_stream_that_only_eager_tells_the_allocator_of(self) -> None:
        """Whose promise it was is said: the program's, by its record_stream."""
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor) -> torch.Tensor:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                a = x @ x
            current.wait_stream(side)
            a.record_stream(current)
            return a @ x

        with config.patch(fold_branches_below_us=0.0):
            self.clean(fn, inputs()[0])
            report = check(fn, inputs()[0], rewrite=without(r"\n.*(record_stream|wait_exit).*"))
        self.assertRegex(
            str(report),
            r"lost: after call 1, call 2, stream 1 may hand on the free memory of stream 1\n"
            r"  the compiled code does not order it: .* on default stream reads buf0(.|\n)*"
            r"  in eager that is so by test_check.py:\d+: a.record_stream\(current\)",
        )

    @simulated_gpu()
    def test_small_branches_are_checked_folded_and_not(self) -> None:
        fn = on_a_side_stream(lambda x: x * 2, then=lambda a, x: a @ x)
        report = self.clean(fn, inputs()[0])
        self.assertRegex(
            str(report), r"note: 1 small branch run on the caller's stream .*; checked with that, and without"
        )
        without_join = without(r"\n *ev1\.wait\(stream0_raw\)")
        self.assertFalse(check(fn, inputs()[0], rewrite=without_join).ok)

    @simulated_gpu()
    def test_misaligned_inputs_are_checked_by_default(self) -> None:
        def branch(x: torch.Tensor) -> torch.Tensor:
            return x.sin() @ x

        fn = on_a_side_stream(branch, then=lambda a, x: a + x)
        aligned = check(fn, inputs()[0], misaligned=False)
        report = self.clean(fn, inputs()[0])
        self.assertGreater(len(report.traces), len(aligned.traces))
        copies = [op for t in report.traces for op in t.operations if getattr(op, "name", "") == "aten.clone.default"]
        self.assertEqual(copies[0].line.partition(": ")[2], "return x.sin() @ x")

    @simulated_gpu()
    def test_loops_over_a_dimension(self) -> None:
        def mapped(x: torch.Tensor) -> torch.Tensor:
            return map_over(lambda row: row.sin() + 1, x)

        def scanned(x: torch.Tensor) -> torch.Tensor:
            return scan(lambda carry, row: (carry + row, carry * row), x[0], x)[1]

        for work in (mapped, scanned):
            with self.subTest(work=work.__name__):
                report = self.clean(on_a_side_stream(work), inputs()[0][:4], fullgraph=True)
                self.assertEqual(report.notes, [])

    @simulated_gpu()
    def test_threads_with_streams_of_their_own(self) -> None:
        streams = [torch.cuda.Stream() for _ in range(2)]
        compiled = torch.compile(lambda x: (x @ x).relu())

        def work(stream: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                y = compiled(x) + 1
                return y, stream.record_event()

        def step(x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(work, streams, [x, x]))
            for _, done in found:
                torch.cuda.current_stream().wait_event(done)
            return found[0][0] + found[1][0]

        report = check(step, inputs()[0], compile=False)
        self.assertEqual((report.races, report.notes), ([], []), str(report))

    @simulated_gpu()
    def test_host_read_of_a_copy_that_is_not_over(self) -> None:
        side = torch.cuda.Stream()

        def copy(x: torch.Tensor, pinned: torch.Tensor) -> None:
            pinned.copy_(x * 2, non_blocking=True)

        def step(x: torch.Tensor, pinned: torch.Tensor) -> torch.Tensor:
            y = compiled(x, pinned)
            if synchronizes:
                side.synchronize()
            return y + int(pinned[0, 0])

        compiled = torch.compile(on_a_side_stream(copy, False, lambda _, x, pinned: x + 1, side))
        for synchronizes in (True, False):
            pinned = torch.zeros(64, 64).pin_memory()
            report = check(step, inputs()[0], pinned, compile=False)
            self.assertEqual({race.kind for race in report.races}, set() if synchronizes else {"host"}, str(report))

    @simulated_gpu()
    def test_two_frames_that_share_a_side_stream(self) -> None:
        side = torch.cuda.Stream()
        first, second = torch.compile(forked(side)), torch.compile(forked(side))

        check(lambda x, w: second(first(x, w), w) + first(w, x), *inputs(), compile=False, calls=3).raise_if_any()

    @simulated_gpu()
    def test_modules_and_graph_breaks(self) -> None:
        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(64, 64, device="cuda")
                self.side = torch.cuda.Stream()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                current = torch.cuda.current_stream()
                self.side.wait_stream(current)
                with torch.cuda.stream(self.side):
                    a = self.linear(x)
                torch._dynamo.graph_break()
                current.wait_stream(self.side)
                return a + x

        report = self.clean(Layer(), inputs()[0], backward=True)
        self.assertTrue(any("gradient of linear.weight" in str(p) for p in report.boundary))

    @form.slow
    def test_control_flow_on_the_device(self) -> None:
        """Predicates are read from a device that computes nothing: loops end all the same, in eager, too."""

        def higher_order(x: torch.Tensor) -> torch.Tensor:
            chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            start = torch.zeros((), dtype=torch.int64, device="cuda")
            return torch.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (start, chosen))[1]

        def in_python(x: torch.Tensor) -> torch.Tensor:
            if (x > 2).any() and (x < 5).any():
                x = x + all((x > i).any() for i in range(2))
            while (x > 1).any():
                x = x / 2
            while x.norm().item() > 1:
                x = x / 2
            return x

        def of_unknown_size(x: torch.Tensor) -> torch.Tensor:
            return x * torch.nonzero(x > 0).float().sum()

        for work, joins in itertools.product((higher_order, in_python, of_unknown_size), (True, False)):
            with self.subTest(work=work.__name__, joins=joins), simulated_gpu():
                self.assertEqual(self.clean(on_a_side_stream(work, joins), inputs()[0]).notes, [])

    @simulated_gpu()
    def test_partitions(self) -> None:
        report = self.clean(forked(torch.cuda.Stream()), *inputs(), mode="reduce-overhead", misaligned=False)
        self.assertEqual(len(report.traces), 2)  # as they are, and as CUDA graphs

    @simulated_gpu()
    def test_a_capture_forks_its_streams_and_joins_them(self) -> None:
        """Where a partition's side stream copies what no other stream touches, only the capture needs the two waits."""
        side, source, target = torch.cuda.Stream(), torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")

        def fn(x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.stream(side):
                target.copy_(source * 2)
            return x + 1

        fork, join = r" *ev0\.wait\(stream1_raw\)\n", r" *exit=.*# record ev1 stream1.*\n"
        for pattern in (None, fork, join):
            with self.subTest(pattern=pattern), config.patch(fold_branches_below_us=0.0):
                rewrite = without(pattern) if pattern else None
                report = check(fn, inputs()[0], mode="reduce-overhead", rewrite=rewrite, misaligned=False)
                memory = {race.second.view.memory.name for race in report.races}
                self.assertEqual("the capture of a graph" in memory, pattern is not None, str(report))
                self.assertEqual(report.redundant if pattern is None else [], [])

    def test_the_caller_works_between_forward_and_backward(self) -> None:
        """A captured backward waits for the streams on which eager's would have run."""

        def without_entry(text: str) -> str:
            return text if "tangents_1" not in text else re.sub(r"entry=.*# record_entry .*\n", "", text)

        report = corpus.check_program(by_name("train_two_branches"), "reduce-overhead", rewrite=without_entry)
        self.assertIn(
            "default stream may read the caller's work on stream 1", [p.text for p in report.lost], str(report)
        )

    @simulated_gpu()
    def test_backward_that_writes_over_a_tensor_of_the_caller(self) -> None:
        side, x = torch.cuda.Stream(), torch.empty(64, 64, device="cuda", requires_grad=True)
        count, y = torch.empty(1, device="cuda"), torch.empty(64, 64, device="cuda")

        class Counts(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                count.add_(1)
                return gradient

        def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            return x.clamp(-1, 1) * y

        def into_saved(text: str) -> str:
            return re.sub(r"buf0 = empty_strided_cuda\(.*", "buf0 = primals_2", text) if "tangents_1" in text else text

        self.assertTrue(check(fn, x, y, backward=True).ok)
        report = check(fn, x, y, backward=True, rewrite=into_saved)
        self.assertEqual(report.faults, ("input 1 is written over: the backward writes it, and eager's does not",))
        self.assertIn(f"{report.faults[0]}\n", str(report))
        with self.assertRaises(RaceError):
            report.raise_if_any()
        # Eager's backward writes the count, too.
        self.assertTrue(check(lambda x, y: Counts.apply(x) * 2, x, y, backward=True, compile=False).ok)

    @simulated_gpu()
    def test_misaligned_input_that_a_kernel_takes_for_aligned(self) -> None:
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            return x.sin() @ x

        self.clean(fn, inputs()[0])
        report = check(fn, inputs()[0], rewrite=without(r"\n *\w+ = copy_if_misaligned\(.*\)"))
        fault = "input 0 is misaligned, where triton_poi_fused_sin_0 counts on its alignment"
        self.assertEqual(report.faults, (fault,))

    @simulated_gpu()
    def test_autograd_adds_up_gradients_that_come_from_another_stream(self) -> None:
        """The engine orders the sum after what produces the gradients, and tells the allocator that it reads them."""
        side = torch.cuda.Stream()

        def fn(x):
            current = torch.cuda.current_stream()
            kept = x * 2
            side.wait_stream(current)
            with torch.cuda.stream(side):
                first, second = kept.sin(), kept.cos()
            current.wait_stream(side)
            return first + second

        def step(x):
            result = fn(x)
            torch._dynamo.graph_break()
            result.sum().backward()
            side.wait_stream(torch.cuda.current_stream())
            return result.detach()

        report = self.clean(step, torch.randn(64, 64, device="cuda", requires_grad=True))
        self.assertEqual(report.in_eager, (), str(report))

    @simulated_gpu()
    def test_host_reads_a_row_while_a_copy_fills_it(self) -> None:
        """Of pinned memory of the caller, by each call that copies; another row may be read."""

        def one(ring: torch.Tensor, x: torch.Tensor) -> None:
            ring[1].copy_(x[1], non_blocking=True)

        def listed(ring: torch.Tensor, x: torch.Tensor) -> None:
            torch._foreach_copy_([ring[1]], [x[1]], non_blocking=True)

        for copies in (one, listed):
            for row, races in ((1, {"host"}), (2, set())):
                fn = on_a_side_stream(copies, False, lambda _, ring, x, row=row: ring[row] + 1)
                report = check(fn, torch.zeros(4, 8).pin_memory(), torch.randn(4, 8, device="cuda"), compile=False)
                self.assertEqual({race.kind for race in report.races}, races, str(report))

    @simulated_gpu()
    def test_generated_code_reads_a_row_while_a_copy_fills_it(self) -> None:
        """If the synchronisation is taken out of the text."""
        side = torch.cuda.Stream()

        def fn(ring: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ring[1].copy_(x[1], non_blocking=True)
            side.synchronize()
            return ring[1] + 1

        (text,) = compile_only(fn, torch.zeros(4, 8).pin_memory(), torch.randn(4, 8, device="cuda")).wrappers
        self.assertTrue((report := check_wrapper(text)).ok, str(report))
        waits = re.findall(r"^ *\w+\.synchronize\(\)\n", text, re.MULTILINE)
        self.assertEqual(len(waits), 1, text)
        kinds = {race.kind for race in check_wrapper(text.replace(waits[0], "")).races}
        self.assertEqual(kinds, {"host"})

    @simulated_gpu()
    def test_host_does_not_wait_for_nothing(self) -> None:
        """Eager makes an empty tensor on the device without a copy, and so without a promise to the host."""
        self.clean(lambda x: torch.cat([torch.tensor([], device="cuda"), x * 2]), torch.ones(64, device="cuda"))

    def test_tensors_from_outside_of_the_simulation(self) -> None:
        check(lambda x: x + 1, torch.zeros(4)).raise_if_any()

    def test_bad_input(self) -> None:
        with self.assertRaisesRegex(ValueError, "check: calls must be at least 1, got 0"):
            check(lambda: None, calls=0)
        with self.assertRaisesRegex(ValueError, "sin is compiled already, so fullgraph=True would have no effect"):
            check(torch.compile(torch.sin), fullgraph=True)
        with self.assertRaisesRegex(TypeError, "Linear is a class: pass a function, or an instance of the class"):
            check(torch.nn.Linear, 3)
        with self.assertRaisesRegex(CheckError, "this is not the text of a generated module"):
            check_wrapper("x = 1")
        with self.assertRaisesRegex(ValueError, "no output requires a gradient"), simulated_gpu():
            check(lambda x: x + 1, inputs()[0], backward=True)

    def test_nothing_is_left_behind(self) -> None:
        with simulated_gpu() as gpu:
            check(forked(torch.cuda.Stream()), *inputs())
            self.assertIsNone(gpu.devices.listener)
            self.assertIsNone(gpu.fake_mode.listener)
            result = compile_only(lambda x: x + 1, inputs()[0])
            self.assertEqual(tuple(result.output.shape), (64, 64))


class TestCheckEager(TestCase):
    def test_without_a_gpu(self) -> None:
        if torch.cuda.is_available():
            self.skipTest("there is a GPU")
        with self.assertRaisesRegex(RuntimeError, "no GPU. Without one, check"), check_eager():
            pass

    def test_races_of_eager_code(self) -> None:
        if not torch.cuda.is_available():
            self.skipTest("needs a GPU")
        side = torch.cuda.Stream()
        for waits in (True, False):
            with check_eager() as report:
                x = torch.ones(64, device="cuda")
                if waits:
                    side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.mul_(2)
            self.assertEqual([race.kind for race in report.races], [] if waits else ["WAW"], str(report))
            if not waits:
                self.assertRegex(str(report), r"`aten::mul_.*` on stream 0x\w+ writes tensor .* at test_check.py:\d+")


PROGRAM = """
import torch

side = torch.cuda.Stream()
table = torch.cuda.Stream()

def good(x):
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        a = x * 2
    current.wait_stream(side)
    return a + x

def racy(x):
    with torch.cuda.stream(side):
        a = x * 2
    torch._dynamo.graph_break()
    return a + 1

def unjoined(x):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = x @ x
    return a + 1

def broken(x):
    raise KeyError("model")

def talkative(x):
    for i in range(9999):
        print(i)
    return racy(x)

class Net:
    pass

compiled = torch.compile(good)

def example_inputs():
    return torch.randn(64, 64, device="cuda", requires_grad=True)
"""


class TestNothingToCheck(TestCase):
    def test_code_of_stock_pytorch_is_refused(self) -> None:
        """Its waits aren't seen: each use of a stream would be a race."""
        with (
            config.patch(streams=False),
            self.assertRaisesRegex(ValueError, r"needs torch(_|\._)overlay\.config\.streams"),
        ):
            check(torch.sin, torch.ones(4))

    def test_it_is_said(self) -> None:
        with simulated_gpu():
            x = torch.randn(4, device="cuda")
            plain, nothing = check(torch.sin, x), check(torch.compiler.disable(lambda x: x + 1), x)
        self.assertEqual(plain.unchecked, "no operation on streams or events was found, so there was nothing to order")
        self.assertTrue(str(plain).endswith(f": {plain.unchecked}"))
        self.assertEqual(nothing.unchecked, "nothing was compiled, so nothing was checked")
        self.assertTrue(plain.ok and nothing.ok)


@form.overlay_only
class TestCommandLine(TestCase):
    def run_check(self, *arguments: str) -> tuple[int, str, str]:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        Path(folder, "model.py").write_text(PROGRAM)
        return printed(commands.main, ["check", *(a.replace("model.py", f"{folder}/model.py") for a in arguments)])

    def test_clean(self) -> None:
        status, out, err = self.run_check("model.py:good", "--backward", "--calls", "3", "--plan")
        self.assertEqual(status, 0, err)
        self.assertRegex(out, "(?s)exit.*no races, no lost promises")

    def test_racy_in_eager(self) -> None:
        """The compiled code orders what the function doesn't."""
        for arguments, expected in (((), 1), (("--eager-races", "ok"), 0)):
            status, out, err = self.run_check("model.py:unjoined", "--no-misaligned", *arguments)
            self.assertEqual(status, expected, out + err)
            self.assertRegex(out, r"^in eager the function has \d race")

    def test_racy(self) -> None:
        status, out, _ = self.run_check("model.py:racy")
        self.assertEqual(status, 1)
        self.assertRegex(out, r"RAW: input 0 .*\n.*\n  second .* at model.py:\d+: a = x \* 2\n")

    def test_reader_that_is_gone_changes_no_status(self) -> None:
        """Nor does the program fail, which prints there, too."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model.py").write_text(PROGRAM)
            gone = "import os; reader, stdout = os.pipe(); os.close(reader); os.dup2(stdout, 1)"
            done = form.fork_command("check", f"{folder}/model.py:talkative", first=gone)
        self.assertEqual((done.returncode, done.stderr, done.stdout), (1, "", ""))

    def test_bad_usage(self) -> None:
        for arguments, text in (
            (("model.py:Net",), "model.py is a class: name a function, or an instance of the class"),
            (("model.py:compiled", "--mode", "nonsense"), "good is compiled already, so mode='nonsense' would have no"),
            (("model.py:good", "--mode", "nonsense"), "Unrecognized mode=nonsense, should be one of: default"),
            (("model.py:nothing",), "has no function nothing"),
            (("model.py",), "names no function: the program is given as FILE:FUNCTION"),
            (("elsewhere.py:f",), "no file elsewhere.py"),
            (("model.py:good", "--calls", "0"), "--calls must be at least 1, got 0"),
            (("model.py:broken",), "model.py:28: KeyError: 'model'"),
        ):
            status, out, err = self.run_check(*arguments)
            self.assertEqual(status, 2, out)
            self.assertIn(text, err)
