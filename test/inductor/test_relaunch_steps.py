"""Tests of generated code that C runs as steps: `relaunch.steps`. Compiled for the CPU, the code calls all its kernels;
kernels that C launches are those of a driver that records them."""

import copy
import ctypes
import itertools
import os
import threading
import types
import weakref
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.test_case import TestCase
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode

import form  # noqa: F401
from stand_ins import relaunch_driver
from stand_ins.relaunch_case import define, run_in_threads
from stand_ins.relaunch_driver import function, word
from torch_overlay._inductor.relaunch import steps
from torch_overlay._inductor.relaunch.capture.make_graph import capturing
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.numbers.traced import followed
from torch_overlay._inductor.relaunch.steps import Steps


DEVICE = types.SimpleNamespace(
    index=0, stream_of=lambda index: 7, current=lambda: 0, functions=(0, 0, 0), library_calls=None
)
N = ("input", 0, int)


class StepsTestCase(TestCase):
    def setUp(self):
        super().setUp()
        relaunch_driver.driver().library.stub_reset()
        self.enterContext(mock.patch.object(executable, "implementation", relaunch_driver.module))
        self.steps = []

    def compiled(self, fn, **options):
        """Compile for any size, and run each graph's code as steps where that can be."""
        made = {}
        original = CompiledFxGraph.__call__

        def call(graph, inputs):
            if id(graph) not in made:  # the first call is a warm-up
                made[id(graph)] = Steps(graph.current_callable, DEVICE)
                self.steps.append(made[id(graph)])
                return original(graph, inputs)
            result = made[id(graph)].run(inputs)
            self.assertEqual(inputs, [])
            return result

        self.enterContext(mock.patch.object(CompiledFxGraph, "__call__", call))
        torch._dynamo.reset()
        return torch.compile(fn, dynamic=True, **options)

    def check(self, fn, *calls, step=lambda compiled, *args: compiled(*args)):
        """Compare calls with those of the code as it is, bit by bit. Return the numbers of runs as steps."""
        torch._dynamo.reset()
        found = []
        for make in (lambda: torch.compile(fn, dynamic=True), lambda: self.compiled(fn)):
            compiled, given = make(), copy.deepcopy(calls)
            torch.manual_seed(3)
            found.append([(step(compiled, *args), args) for args in given])
        self.assertEqual(found[1], found[0], rtol=0, atol=0)
        return [each.runs for each in self.steps]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(50, 32), torch.nn.LayerNorm(32)
        self.inner, self.outer = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.norm(x + self.outer(y)).softmax(-1).cumsum(1)


class TestSteps(StepsTestCase):
    def test_attention_of_any_length(self):
        torch.manual_seed(0)
        block = Block().eval()
        calls = [(torch.randint(50, (b, n)),) for b, n in itertools.product((2, 3), (4, 9, 7, 33, 9))]
        with torch.no_grad():
            self.assertEqual(self.check(block, *calls), [6])  # it is followed once more where the batch changes

    def test_training(self):
        torch.manual_seed(0)
        block = Block()

        def step(compiled, tokens):
            block.zero_grad()
            compiled(tokens).square().sum().backward()
            return [p.grad.clone() for p in block.parameters()]

        calls = [(torch.randint(50, (2, n)),) for n in (4, 9, 7, 33, 9)]
        self.assertEqual(self.check(block, *calls, step=step), [2, 2])

    def test_operators_lists_and_results_that_are_inputs(self):
        def fn(x, y):
            z, order = torch.sort(torch.cat([x, y, x * 2], 1), dim=1)
            return z @ z.t(), order, x, x.shape[1] * 3, torch.stack([z, z]), None

        calls = [(torch.randn(4, n), torch.randn(4, m)) for n, m in ((3, 5), (4, 9), (7, 6), (2, 2), (8, 3))]
        self.assertEqual(self.check(fn, *calls), [2])

    def test_updates_of_inputs(self):
        def fn(x, y):
            x.add_(y)
            return x @ y.t()

        calls = [(torch.randn(n, 6), torch.randn(n, 6)) for n in (3, 5, 4, 7)]
        self.assertEqual(self.check(fn, *calls), [1])

    def test_random_numbers_are_those_of_the_code(self):
        calls = [(torch.randn(n, 8),) for n in (3, 5, 9, 4)]
        self.assertEqual(self.check(lambda x: F.dropout(x, 0.5) @ x.t(), *calls), [1])

    def test_number_that_was_the_same_is_a_condition(self):
        calls = [(torch.randn(k, 6), n) for k, n in ((3, 4), (5, 4), (6, 4), (7, 5), (8, 6), (8, 4))]
        # It is followed once more at the first 5.
        self.assertEqual(self.check(lambda x, n: (x * n).sum(0) @ x.t(), *calls), [2])

    def test_inputs_are_freed_as_soon_as_no_step_takes_them(self):
        alive = []

        def seen(x):
            alive.append([ref() is not None for ref in refs])
            return x.clone()

        with torch.library._scoped_library("overlay_steps", "FRAGMENT") as library:
            define(library, "seen(Tensor x) -> Tensor", seen)

            def fn(x, y):
                first = torch.ops.overlay_steps.seen((x @ x).sum(0))
                return first + torch.ops.overlay_steps.seen(y @ first)

            self.compiled(fn)
            compiled = torch.compile(fn, dynamic=True)
            for n in (3, 4, 5, 6):
                given = [torch.randn(n, n), torch.randn(n, n)]
                refs = [weakref.ref(v) for v in given]
                compiled(given.pop(0), given.pop(0))
        self.assertEqual([each.runs for each in self.steps], [1])
        self.assertEqual(alive[-2:], alive[2:4])  # as the code does it

    def test_results_that_no_step_takes_are_freed_at_once(self):
        refs, alive = [], []

        def pair(x):
            made = x + 1, x + 2
            refs.append(weakref.ref(made[1]))
            return made

        def seen(x):
            alive.append(refs[-1]() is not None)
            return x.clone()

        with torch.library._scoped_library("overlay_steps", "FRAGMENT") as library:
            pair_like = lambda x: (torch.empty_like(x), torch.empty_like(x))  # noqa: E731
            define(library, "pair(Tensor x) -> (Tensor, Tensor)", pair, pair_like)
            define(library, "seen(Tensor x) -> Tensor", seen)
            compiled = self.compiled(lambda x: torch.ops.overlay_steps.seen(torch.ops.overlay_steps.pair(x)[0]))
            for n in (3, 4, 5, 6):
                compiled(torch.randn(n))
        self.assertEqual((alive[-1], [each.runs for each in self.steps]), (False, [1]))

    def test_error_of_an_operator(self):
        def checked(x):
            if x.shape[0] == 13:
                raise ValueError("thirteen")
            return x.clone()

        with torch.library._scoped_library("overlay_steps", "FRAGMENT") as library:
            define(library, "checked(Tensor x) -> Tensor", checked)
            compiled = self.compiled(lambda x: torch.ops.overlay_steps.checked(x * 2) + 1)
            for n in (3, 4, 5):
                compiled(torch.randn(n))
            with self.assertRaisesRegex(ValueError, "thirteen"):
                compiled(torch.randn(13))
            x = torch.randn(6)
            self.assertEqual(compiled(x), x * 2 + 1)
            self.assertEqual([each.runs for each in self.steps], [1])

    def test_threads(self):
        calls = [torch.randn(n, 8) for n in range(3, 40)]
        compiled = self.compiled(lambda x: (x @ x.t()).softmax(-1) @ x)
        for x in calls[:3]:
            compiled(x)
        wrong = []

        def serve():
            for x in calls:
                if not torch.equal(compiled(x), torch.compile(lambda x: (x @ x.t()).softmax(-1) @ x)(x)):
                    wrong.append(x.shape)

        run_in_threads(*4 * [serve])
        self.assertEqual(wrong, [])


class TestWrittenCode(StepsTestCase):
    """Code with a generated module's globals, written for what Inductor seldom generates."""

    def code(self, *lines, names="x, n", **namespace):
        scope = {"torch": torch, "aten": torch.ops.aten, "empty_strided_cuda": torch.empty_strided, **namespace}
        body = "".join(f"    {line}\n" for line in lines)
        exec(f"def call(args):\n    {names} = args\n    args.clear()\n{body}", scope)
        return Steps(scope["call"], DEVICE)

    def check(self, code, calls, expected):
        """Call code with these sizes, or with these numbers, of which the first is the size."""
        for n, *more in (call if isinstance(call, tuple) else (call,) for call in calls):
            x = torch.randn(n)
            self.assertEqual(code.run([x, n, *more])[0], expected(x, n, *more), rtol=0, atol=0)

    def test_steps_are_for_the_outcomes_of_comparisons_that_were_shown(self):
        code = self.code("return (aten.mul(x, 2.0) if n > 5 else aten.add(x, n),)")
        self.check(code, (7, 8, 9, 3, 6, 5, 20), lambda x, n: x * 2 if n > 5 else x + n)
        self.assertEqual((code.runs, code.why_not), (3, ""))

    def test_what_code_does_unnoticed_with_a_number_differs_in_the_second_call(self):
        code = self.code("return (aten.add(x, int(n)),)")
        self.check(code, (7, 8, 9), lambda x, n: x + n)
        self.assertIn("two calls take different steps", code.why_not)

    def test_stand_in_that_another_thread_has_kept_notes_nothing_later(self):
        held = []
        code = self.code("get_raw_stream(0)", "return (aten.mul(x, 2.0),)", get_raw_stream=lambda index: None)
        scope = code.model.__globals__
        scope["get_raw_stream"] = lambda index: held.append(scope["aten"])
        self.check(code, (3,), lambda x, n: x * 2)
        before = len(code._first.steps)
        self.assertEqual(held[0].mul(torch.ones(2), 2.0), torch.full((2,), 2.0))
        self.assertEqual((len(code._first.steps), scope["aten"]), (before, torch.ops.aten))

    def test_code_runs_as_it_is_while_a_region_is_captured(self):
        code = self.code("return (aten.mul(x, 2.0),)")
        with capturing:
            self.check(code, (3, 4, 5), lambda x, n: x * 2)
        self.assertEqual(code.runs, 0)
        self.check(code, (3, 4, 5), lambda x, n: x * 2)
        self.assertEqual(code.runs, 1)

    def test_float_that_was_the_same(self):
        code = self.code("return (aten.mul(x, f),)", names="x, n, f")
        self.check(code, ((3, 0.5), (4, 0.5), (5, 0.25), (6, 0.75)), lambda x, n, f: x * f)
        self.assertEqual(code.runs, 1)

    def test_number_that_can_not_be_followed_is_a_plain_one(self):
        code = self.code("return (aten.mul(x, f ** 2),)", names="x, n, f")
        self.check(code, ((3, 0.5), (4, 1.5), (5, 0.25)), lambda x, n, f: x * f**2)
        self.assertIn("two calls take different steps", code.why_not)

    def test_tensor_that_no_step_made(self):
        code = self.code("return (aten.mul(x, x.grad),)")
        for n in (3, 4, 5):
            x = torch.randn(n)
            x.grad = torch.ones(n)
            self.assertEqual(code.run([x, n])[0], x)
        self.assertIn("no step made", code.why_not)

    def test_what_steps_do_not_express(self):
        refused = {
            "returns what is no tensor": "return (aten.mul(x, 2.0 if x.sum().item() > 0 else 3.0),)",
            "is_nonzero returns": "return (aten.mul(x, 2.0 if aten.is_nonzero(aten.sum(x)) else 3.0),)",
            "another stream": "kernel.run(x, stream=3); return (aten.mul(x, 2.0),)",
            "torch.cuda.synchronize": "torch.cuda.synchronize and None; return (aten.mul(x, 2.0),)",
            "it uses torch.backends": "torch.backends; return (aten.mul(x, 2.0),)",
            "it uses os": "os.getpid(); return (aten.mul(x, 2.0),)",
            "it uses held": "return (aten.mul(x, held[0]),)",
        }
        kernel = types.SimpleNamespace(run=lambda *args, stream: None)
        for why, line in refused.items():
            with self.subTest(line):
                code = self.code(line, kernel=kernel, os=os, held=[torch.ones(1)])
                code.run([torch.randn(3), 3])
                self.assertIn(why, code.why_not)

    def test_code_under_a_dispatch_mode_runs_as_it_is(self):
        seen = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        code = self.code("return (aten.mul(x, 2.0),)")
        self.check(code, (3, 4, 5), lambda x, n: x * 2)
        inputs = [torch.ones(6), 6]
        with Mode():
            code.run(inputs)
        self.assertEqual((seen, code.runs), ([torch.ops.aten.mul.Tensor], 1))

    def test_tensor_among_the_globals_is_a_constant(self):
        code = self.code("return (aten.mul(x, constant0),)", constant0=torch.tensor(3.0))
        self.check(code, (3, 4, 5), lambda x, n: x * 3)
        self.assertEqual((code.runs, code.why_not), (1, ""))

    def test_kernel_of_another_launcher_gets_the_stream_of_each_run(self):
        streams = []

        def run(x, n, stream):
            streams.append((n, stream))
            x.add_(n)

        code = self.code(
            "stream0 = get_raw_stream(0)",
            "kernel.run(x, n, stream=stream0)",
            "return (x,)",
            kernel=types.SimpleNamespace(run=run),
            get_raw_stream=lambda index: 7,
        )
        for n in (3, 4, 5):
            x = torch.zeros(n)
            self.assertEqual(code.run([x, n])[0], torch.full((n,), float(n)))
        self.assertEqual((streams, code.runs), ([(3, 7), (4, 7), (5, 7)], 1))

    def test_other_threads_use_the_globals_as_they_are(self):
        entered, done = threading.Event(), threading.Event()

        def waits(index):
            if not entered.is_set():
                entered.set()
                done.wait(60)

        code = self.code("get_raw_stream(0)", "return (aten.mul(x, 2.0),)", get_raw_stream=waits)
        results = []

        def other():
            entered.wait(60)
            results.append(code.run([torch.ones(4), 4])[0])
            done.set()

        thread = threading.Thread(target=other)
        thread.start()
        self.check(code, (3,), lambda x, n: x * 2)
        thread.join()
        self.assertEqual(results, [torch.full((4,), 2.0)])
        self.check(code, (5, 6), lambda x, n: x * 2)
        self.assertEqual((code.runs, code.why_not), (1, ""))


class Kernel:
    """As torch's static launcher has it."""

    arg_tys, num_warps, shared, name = "OOil", 4, 48, "triton_poi"
    has_global_scratch, has_profile_scratch = True, False

    def __init__(self):
        self.function = function(8, 8, 4, 8, 8)


class TestKernels(StepsTestCase):
    def in_c(self, shown, conditions=(), current=lambda: 0):
        return relaunch_driver.module().steps(
            **shown.arguments(conditions), device=(0, current, lambda index: 0x55, 0), calls=None
        )

    def shown(self):
        """A launch that a call with 300 and a tensor makes."""
        shown, n, x = steps.Shown(), followed(300, N), torch.zeros(4)
        shown.inputs = 2
        for value in (n, x):
            shown.add(value)
        self.assertTrue(shown.note_kernel(Kernel(), ((n + 127) // 128, 1, 1), (x, None, n * 2, 5)))
        shown.result = shown.operand(x)
        return shown

    def launched(self, in_c, inputs):
        driver = relaunch_driver.driver()
        driver.take()
        self.assertIsNotNone(in_c.run(inputs))
        return driver.take()

    def test_parameters_grid_and_stream(self):
        in_c = self.in_c(self.shown())
        x = torch.zeros(4)
        ((kind, name, grid, block, shared, stream, values, _),) = self.launched(in_c, [300, x])
        self.assertEqual((kind, grid, block, shared, stream), ("run", "3,1,1", "128,1,1", "48", "0x55"))
        wanted = [word(x.data_ptr()), word(0), (600).to_bytes(4, "little"), word(5), word(0)]
        self.assertEqual(values, ",".join(each.hex() for each in wanted))
        ((*_, grid, _, _, _, _, _),) = self.launched(in_c, [1, x])
        self.assertEqual(grid, "1,1,1")

    def test_no_blocks_are_no_launch(self):
        in_c = self.in_c(self.shown())
        self.assertEqual(self.launched(in_c, [0, torch.zeros(4)]), [])

    def test_numbers_that_do_not_fit_leave_the_inputs(self):
        in_c = self.in_c(self.shown(), [("positive", ("sub", ("const", 9000, ""), N))])
        for number in (1 << 31, 9001, 1.0, True):
            inputs = [number, torch.zeros(4)]
            self.assertIsNone(in_c.run(inputs))
            self.assertEqual(len(inputs), 2)
        self.assertEqual(in_c.runs, 0)

    def test_other_device_and_missing_context(self):
        inputs = [300, torch.zeros(4)]
        self.assertIsNone(self.in_c(self.shown(), current=lambda: 1).run(inputs))
        self.assertEqual(len(inputs), 2)
        in_c = self.in_c(self.shown())
        library = relaunch_driver.driver().library
        library.forget_context()
        self.addCleanup(library.cuCtxSetCurrent, ctypes.c_void_p(0xC0FFEE))
        self.assertEqual([line[0] for line in self.launched(in_c, [300, torch.zeros(4)])], ["context", "run"])

    def test_steps_that_name_what_is_not_there(self):
        arguments = self.shown().arguments(())
        (step,) = arguments["steps"]
        for position, wrong, error in (
            (0, 5, "a step of an unknown kind"),
            (1, (1, 2), "a kernel is"),
            (3, (5,) * 3, "a grid is made of words"),
            (3, (0, 0), "no three dimensions"),
            (3, (0, 0, 0, 99), "an operand has a number that isn't there: 99"),
            (5, (0,), "a result has a number that isn't there: 0"),
            (6, (-1,), "what is dropped has a number that isn't there: -1"),
            (4, (0,), "other items than results"),
        ):
            changed = (*step[:position], wrong, *step[position + 1 :])
            with self.assertRaisesRegex((ValueError, TypeError), error):
                relaunch_driver.module().steps(**arguments | {"steps": (changed,)}, device=(0, int, int, 0), calls=None)

    def test_error_of_the_driver(self):
        in_c = self.in_c(self.shown())
        relaunch_driver.driver().fail("cuLaunchKernelEx", 700)
        with self.assertRaisesRegex(RuntimeError, "cuLaunchKernelEx.*triton_poi"):
            in_c.run([300, torch.zeros(4)])
