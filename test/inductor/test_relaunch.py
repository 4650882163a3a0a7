"""Regions are captured once and relaunched for ever: what a call allocates, patches, launches and returns.

Most of it runs on a device made of host memory (`relaunch_device`), where a "region" is a function that allocates like
generated code does. The proof, the recipes of outputs and the patching are the real ones.
"""

import contextlib
import ctypes
import functools
import gc
import math
import sys
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.test_case import TestCase
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, GraphPartitionMap

import form
from stand_ins import relaunch_driver
from stand_ins.relaunch_case import ADD, define, GpuTestCase, host, region, RelaunchTestCase, run_in_threads
from stand_ins.relaunch_device import Executable, Generator, is_tensor, tensor_at
from torch_overlay import config
from torch_overlay._inductor.relaunch import causes, compiled_region, hooks, keys, notes, runner, runners, split_off
from torch_overlay._inductor.relaunch.capture import allocations, capture, make_graph
from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.launch import relaunch
from torch_overlay._inductor.relaunch.notes import CompiledNotes
from torch_overlay._inductor.relaunch.runner import COPY_SETTER
from torch_overlay._inductor.relaunch.verify import describe_difference, VerifyError
from torch_overlay.csrc import DriverError
from torch_overlay.testing import compile_only, simulated_gpu


class TestLifeOfARegion(RelaunchTestCase):
    def test_first_call_runs_second_captures_later_ones_relaunch(self):
        run = self.runner(ADD, static=[1])
        w = torch.randn(4, 4)
        for n in range(5):
            x = torch.randn(4, 4)
            inputs = [x, w]
            (out,) = run(inputs)
            self.assertEqual(out, x * w + x)
            self.assertEqual(inputs, [], "the callee clears the list")
            self.assertEqual(self.counted("captures"), int(n > 0))
            self.assertEqual(self.counted("relaunches"), n)

    def test_first_calls_look_after_large_inputs_of_a_backward_alone(self):
        """To look after each of hundreds of inputs takes longer than to launch the kernels."""
        source = region("x, w, n", "return (torch.mul(x, n, out=new(4, 4)),)")
        for is_backward, watched in ((False, 0), (True, 3)):  # the large one, in the first call of each size
            run = self.runner(source, is_backward=is_backward)
            with (
                mock.patch.object(runner, "LARGE", 4 << 10),
                mock.patch.object(runner, "StorageWeakRef", wraps=runner.StorageWeakRef) as ref,
            ):
                for n in (1, 2, 3):
                    run([torch.randn(4, 4), torch.randn(1 << 10), n])
            self.assertEqual((ref.call_count, run.outside["warm-up"]), (watched, 3))

    def test_outputs_are_never_overwritten(self):
        run = self.runner(ADD, static=[1])
        w, held = torch.randn(4, 4), []
        for _ in range(6):
            x = torch.randn(4, 4)
            held.append((run([x, w])[0], x * w + x))
        self.assertEqual([h for h, _ in held], [e for _, e in held])
        self.assertEqual(len({h.data_ptr() for h, _ in held}), 6)

    def test_output_and_input_of_the_next_call(self):
        run = self.runner(ADD, static=[1])
        w = torch.full((4, 4), 0.5)
        x = expected = torch.randn(4, 4)
        for _ in range(6):
            (x,) = run([x, w])
            expected = expected * w + expected
        self.assertEqual(x, expected)

    def test_same_tensor_for_two_inputs(self):
        run = self.runner(ADD)
        for _ in range(4):
            x = torch.randn(4, 4)
            self.assertEqual(run([x, x])[0], x * x + x)

    def test_a_caller_that_captures_gets_the_region_inline(self):
        run = self.runner(ADD, static=[1])
        w = torch.randn(4, 4)
        for _ in range(3):
            run([torch.randn(4, 4), w])
        before = self.counted("relaunches")
        self.device.captured_by_user = True
        self.add(run, w=w)
        self.assertEqual(self.counted("relaunches"), before)

    def test_threads(self):
        run = self.runner(ADD, static=[1])
        errors = []

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            w = torch.randn(4, 4, generator=generator)
            for _ in range(60):
                x = torch.randn(4, 4, generator=generator)
                (out,) = run([x, w])
                if not torch.equal(out, x * w + x):
                    errors.append(seed)

        run_in_threads(*[functools.partial(work, seed) for seed in range(4)])
        self.assertEqual(errors, [])
        self.assertGreater(self.counted("relaunches"), 0)

    def check_finalizer(self, **options):
        """The collector runs in a launch, and a finalizer calls compiled code: this region, and another one."""
        run, other = self.runner(ADD, **options), self.runner(ADD, **options)
        inside, replay, counted = [], Executable.replay, self.counted

        class Garbage:
            def __del__(self):
                relaunched = counted("relaunches")
                for each in (run, other):
                    x, w = torch.randn(4, 4), torch.randn(4, 4)
                    inside.append(torch.equal(each([x, w])[0], x * w + x))
                inside.append(counted("relaunches") == relaunched)

        def collecting(executable):
            if not inside and self.counted("relaunches") > 3:
                garbage = Garbage()
                garbage.itself = garbage
                del garbage
                gc.collect()
            replay(executable)

        def work():
            for each in (run, other) * 4:
                self.add(each)

        with mock.patch.object(Executable, "replay", collecting):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(60)
        self.assertFalse(thread.is_alive(), "it waits for a lock of its own")
        self.assertEqual(inside, [True] * 3)
        self.assertEqual(self.counted("relaunches"), 6)

    def test_finalizer_while_a_lock_is_held(self):
        run = self.runner(ADD)
        for lock in (run.states.lock, allocations._hooks_lock):
            with lock:
                self.assertTrue(lock.acquire(blocking=False))
                lock.release()
        with run.states.lock, allocations._hooks_lock:
            self.add(run, 3)
        self.assertEqual(self.counted("relaunches"), 2)

    def test_region_that_is_called_while_its_graphs_are_given_up(self):
        run = self.warmed()
        called = []
        (state,) = run.states.values()
        weakref.finalize(state, lambda: called.append(run([torch.randn(4, 4), torch.randn(4, 4)])))
        del state
        runners.forget_all()
        self.assertEqual((len(called), len(run.states)), (1, 1))

    def test_all_is_gone_with_the_runner(self):
        gc.collect()
        before = runners.counts()
        run = self.warmed()
        self.assertEqual(runners.counts()["templates"], before["templates"] + 1)
        del run
        gc.collect()
        self.assertEqual(runners.counts(), before)

    def test_plan_that_another_thread_forgets_before_a_size_is_run(self):
        run = self.runner(ADD)
        other = threading.Thread(target=run.forget)

        original = runner.repeat

        def late(*args):
            other.start()
            other.join()
            return original(*args)

        run([torch.randn(4, 4), torch.randn(4, 4)])
        run.states.clear()
        with mock.patch.object(runner, "repeat", late):
            self.add(run)

    def test_module_gets_its_allocator_back(self):
        run = self.warmed()
        self.assertEqual(run.region.model.__globals__["empty_strided_cuda"], self.device.empty)

    def test_finalizer_in_a_launch(self):
        for by, direct, verify in (
            ("the C module", True, False),
            ("it, verified", True, True),
            ("torch", False, False),
        ):
            with self.subTest(by), mock.patch.object(Executable, "direct", direct):
                counters.clear()
                self.check_finalizer(verify=verify)

    def test_launch_inside_of_a_launch_says_so(self):
        run, errors = self.runner(ADD), []
        self.add(run, 2)
        (state,) = run.states.values()
        replay = Executable.replay

        def nested(executable):
            try:
                state.relaunch.launch([torch.randn(4, 4), torch.randn(4, 4)])
            except RuntimeError as error:
                errors.append(str(error))
            replay(executable)

        with mock.patch.object(Executable, "replay", nested):
            self.add(run)
        self.assertEqual(errors, ["launch() inside of a launch"])

    def test_only_what_moved_is_patched(self):
        run = self.runner(ADD, static=[1])
        x, w, held = torch.randn(4, 4), torch.randn(4, 4), []
        patched = []
        for moves in (False, False, False, True, False):
            if moves:
                w = torch.randn(4, 4)
            before = runners.stats()["nodes_patched"]
            held.append(run([x, w]))  # a new output each time, by the second node; scratch is where it was, or not
            patched.append(runners.stats()["nodes_patched"] - before)
            self.assertEqual(held[-1][0], x * w + x)
        self.assertEqual(patched[1], 2, "the first launch sets all nodes")
        self.assertLessEqual(max(patched), 2)

    def test_static_input_that_comes_back(self):
        """Where it is compared with is the executable, whoever patched it last."""
        run = self.runner(ADD, static=[1])
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        for w in (a, a, a, b, a, b, b, a):
            self.add(run, w=w)
        self.assertEqual(self.counted("captures"), 1)

    def test_storage_exchanged_under_the_same_parameter(self):
        run = self.runner(ADD, static=[1])
        w, other = (torch.nn.Parameter(torch.randn(4, 4), requires_grad=False) for _ in range(2))
        base = torch.randn(8, 4)
        for change in (
            lambda: None,
            lambda: None,
            lambda: None,
            lambda: setattr(w, "data", base[:4]),
            lambda: setattr(w, "data", base[4:]),
            lambda: torch.utils.swap_tensors(w, other),
            lambda: None,
        ):
            change()
            self.add(run, w=w)
        self.assertEqual(self.counted("captures"), 1)

    def test_no_reference_is_lost_or_gained(self):
        run = self.warmed(static=[1])
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        before = sys.getrefcount(x), sys.getrefcount(w)
        gc.collect()
        objects = len(gc.get_objects())
        for _ in range(500):
            run([x, w])
        self.assertEqual((sys.getrefcount(x), sys.getrefcount(w)), before)
        gc.collect()
        self.assertLess(len(gc.get_objects()) - objects, 250)

    def test_launch_that_fails_leaves_its_inputs(self):
        run = self.warmed(static=[1])
        for name in ("cuGraphLaunch", "cuGraphExecKernelNodeSetParams"):
            relaunch_driver.driver().fail(name, 2)
            inputs = [torch.randn(4, 4), torch.randn(4, 4)]
            with self.assertRaisesRegex(RuntimeError, rf"CUDA driver error in {name}: out of memory \(2\)"):
                run(inputs)
            self.add(run, x=inputs[0], w=inputs[1])

    def test_counter_that_is_not_where_it_was(self):
        run = self.runner(ADD, static=[1])
        w = torch.randn(4, 4)

        def call():
            run([torch.randn(4, 4), w])

        for _ in range(3):
            call()
        group = counters["torch_overlay"]
        for before, after in ((5, 6), (1 << 80, (1 << 80) + 1), ((1 << 63) - 1, 1 << 63), (2.5, 3.5)):
            group["cudagraph_relaunches"] = before
            call()
            self.assertEqual(group["cudagraph_relaunches"], after)
        del group["cudagraph_relaunches"]
        call()
        self.assertEqual(self.counted("relaunches"), 1)
        counters.clear()
        call()
        call()
        self.assertEqual((self.counted("relaunches"), group["cudagraph_relaunches"]), (2, 1))
        counters["torch_overlay"] = None
        with self.assertRaises(TypeError):
            call()
        counters.clear()

    def test_executable_outlives_a_call_that_is_under_way(self):
        """Another thread may give up the graphs while this one is about to launch."""
        run = self.warmed(static=[1])
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        try_launch = run.states.try_launch
        self.device.executables.clear()
        run.forget()
        gc.collect()
        self.assertIsNone(run.states.try_launch)
        self.assertEqual(try_launch([x, w])[0], x * w + x)

    def test_wrong_arguments(self):
        run = self.warmed()
        call = next(iter(run.states.values())).relaunch.call
        with self.assertRaisesRegex(TypeError, "launch\\(\\) wants a list of 2 inputs or more"):
            call.launch([torch.randn(4, 4)])
        with self.assertRaises(TypeError):
            call.launch()
        with self.assertRaises(TypeError):
            type(call)()
        with self.assertRaises(AttributeError):
            call.launch([torch.randn(4, 4), 3])
        self.assertIsNone(call.try_launch((torch.randn(4, 4), torch.randn(4, 4))))


class TestKeys(RelaunchTestCase):
    SIZED = region("x, n", "buf0 = torch.mul(x, n, out=new(n))", "return (buf0, n)")

    def test_least_recently_used_goes(self):
        with config.patch(cudagraph_templates=2):
            run = self.runner(self.SIZED)
        for n in (3, 3, 5, 5, 3, 7, 7):
            run([torch.randn(n), n])
        self.assertEqual(list(run.states), [(3,), (7,)])

    def test_too_many_sizes_run_as_compiled(self):
        with config.patch(cudagraph_templates=1):
            run = self.runner(self.SIZED)
        for n in range(2, 12):
            for _ in range(2):
                x = torch.randn(n)
                self.assertEqual(run([x, n])[0], x * n)
        self.assertEqual(self.counted("captures"), 4)
        self.assertIn("cudagraph_templates", causes.refusals()[0])

    SCALED = region(
        "x, s",
        "buf0 = torch.mul(x, 1 / s if s else math.copysign(math.inf, s), out=new(4, dtype=torch.float64))",
        "return (buf0, s)",
    )

    def check_floats(self, values, captures, place=lambda value: value, **options):
        run = self.runner(self.SCALED.replace("/ s", "/ float(s)"), math=math, **options)
        for value in values * 3:
            x = torch.rand(4, dtype=torch.float64) + 1
            want = x * (1 / value if value else math.copysign(math.inf, value))
            got, same = run([x, place(value)])
            self.assertTrue(torch.equal(got.view(torch.int64), want.view(torch.int64)), value)
            self.assertEqual(bit_key(float(same)), bit_key(value))
        self.assertEqual(causes.refusals(), [])
        self.assertEqual((self.counted("captures"), len(run.states)), (captures, captures))
        self.assertEqual(self.counted("relaunches"), 3 * len(values) - captures)

    def test_floats_are_numbers_by_their_bits(self):
        zeros, in_a_vector = [0.0, -0.0, 2.0], lambda value: host([value], torch.float32)
        for hazard, values, captures, options in (
            ("zero and minus zero are two numbers", zeros, 3, {}),
            ("zero and minus zero are two numbers in host memory", zeros, 3, {"place": host}),
            ("zero and minus zero are two numbers in a vector in host memory", zeros, 3, {"place": in_a_vector}),
            ("nan is itself", [math.nan, -math.nan, float("nan")], 2, {}),
            ("nan is itself in host memory", [math.nan], 1, {"place": host}),
            ("nan is itself for verify", [math.nan, -0.0], 2, {"verify": True}),
        ):
            with self.subTest(hazard):
                counters.clear()
                self.check_floats(values, captures, **options)

    def test_number_of_another_type_is_another_number(self):
        source = region("x, n", "return (torch.neg(x), n)")
        run = self.runner(source)
        values = [True, 1, 1.0, 1 + 0j, 2**53, 2.0**53, 2**53 + 1, (1, 0.0), (1, -0.0), (True, 0.0), [1, (0.0,)], None]
        for value in values * 3:
            x = torch.randn(4)
            out, same = run([x, value])
            self.assertEqual((repr(same), out), (repr(value), -x))
        self.assertEqual((self.counted("captures"), len(run.states)), (len(values), len(values)))

    def test_complex_numbers_differ_in_each_part(self):
        values = [complex(a, b) for a in (0.0, -0.0) for b in (0.0, -0.0, math.nan)]
        self.assertEqual(len({bit_key(value) for value in values}), 6)
        self.assertEqual(bit_key(complex(0.0, math.nan)), bit_key(complex(0.0, float("nan"))))

    def test_tensor_in_host_memory_differs_by_type_and_bits(self):
        made = [torch.tensor(v, dtype=t) for t in (torch.float32, torch.bfloat16) for v in (0.0, -0.0, 1.0, math.nan)]
        made += [torch.tensor(1), torch.tensor(True), torch.tensor(2**53 + 1), torch.tensor(2.0**53), torch.tensor(1j)]
        made += [torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), torch.tensor([0, 1]), torch.tensor([])]
        self.assertEqual(len({keys.host_value(t) for t in made}), len(made))
        self.assertEqual([keys.host_value(t.clone()) for t in made], [keys.host_value(t) for t in made])

    def test_tensor_in_host_memory_that_has_grown_has_no_graph(self):
        """Its address says nothing of its values."""
        run = self.runner(region("x, s", "buf0 = torch.mul(x, s.sum().item(), out=new(4))", "return (buf0,)"))
        grown = host([0.0] * 9)
        for n in range(4):
            for s in (host([2.0, 3.0]), grown.fill_(n)):
                s.on_host = True
                x = torch.randn(4)
                self.assertEqual(run([x, s])[0], x * s.sum())
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 3))
        self.assertEqual(self.counted("refusals"), 1)
        self.assertIn("[host-tensor]: input 1 is a tensor of 9 values in host memory", causes.refusals()[0])


class TestCopyOnWrite(RelaunchTestCase):
    """A tensor of torch._lazy_clone lies where its base does, until somebody asks for memory to write to."""

    ACCUMULATE = region("x, y", "x.add_(y)", "buf0 = torch.neg(x, out=new(4))", "return (buf0, x)")

    def check(self, place, calls=6, **options):
        """`place` makes an input of a base, and what shares its memory and is to stay as it is."""
        run = self.runner(self.ACCUMULATE, mutated=[0], **options)
        for _ in range(calls):
            x, other = place(torch.randn(4))
            kept, y = other.clone(), torch.randn(4)
            wanted = x.clone() + y
            self.assertTrue(torch._C._is_cow_tensor(x))
            out, same = run([x, y])
            self.assertIs(same, x)
            self.assertEqual((x, out, other), (wanted, -wanted, kept))
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, calls - 1))

    def test_written_tensor_leaves_what_shares_its_memory(self):
        clone, x = torch._lazy_clone, torch.randn(4)
        parameter = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        for hazard, place, options in (
            ("written clone leaves its base", lambda base: (clone(base), base), {}),
            ("written base leaves its clone", lambda base: (base, clone(base)), {}),
            ("written view of a clone", lambda base: (clone(base.repeat(3))[4:8], base), {}),
            ("verified", lambda base: (clone(base), base), {"verify": True}),
            ("one tensor, cloned between the calls", lambda _: (x, clone(x)), {}),
            ("static one, cloned between the calls", lambda _: (x, clone(x)), {"static": [0]}),
            ("parameter, cloned between the calls", lambda _: (parameter, clone(parameter)), {"static": [0]}),
        ):
            with self.subTest(hazard):
                counters.clear()
                self.check(place, **options)

    def test_two_clones_of_one_base(self):
        source = region("x, y, z", "x.add_(1)", "y.mul_(2)", "buf0 = torch.add(x, z, out=new(4))", "return (buf0,)")
        run = self.runner(source, mutated=[0, 1])
        for _ in range(5):
            base = torch.randn(4)
            kept, x, y = base.clone(), torch._lazy_clone(base), torch._lazy_clone(base)
            self.assertEqual(run([x, y, base])[0], kept + 1 + kept)
            self.assertEqual((x, y, base), (kept + 1, kept * 2, kept))

    def test_clone_that_is_read_and_returned(self):
        source = region("x", "buf0 = torch.neg(x, out=new(4))", "return (buf0, x, x.view(2, 2))")
        run = self.runner(source, saved=[1])
        for _ in range(6):
            base = torch.randn(4)
            kept, x = base.clone(), torch._lazy_clone(base)
            out, same, view = run([x])
            base.add_(1)
            self.assertIs(same, x)
            self.assertEqual((out, same, view), (-kept, kept, kept.view(2, 2)))
            view.zero_()
            self.assertEqual((x, base), (torch.zeros(4), kept + 1))
        self.assertEqual(self.counted("relaunches"), 5)


class TestOutputs(RelaunchTestCase):
    def check(self, source, make, expected, calls=5, **kwargs):
        run = self.runner(source, **kwargs)
        results = []
        for _ in range(calls):
            inputs = make()
            wanted = expected(*[t.clone() if is_tensor(t) else t for t in inputs])
            result = run(list(inputs))
            self.assertEqual(len(result), len(wanted))
            for got, want in zip(result, wanted):
                self.assertEqual(got, want)
                if is_tensor(want):
                    self.assertEqual(got.stride(), want.stride())
            results.append((inputs, result))
        self.assertEqual(self.counted("refusals"), 0, causes.refusals())
        self.assertEqual(self.counted("relaunches"), calls - 1)
        return run, results

    def test_none_numbers_and_a_repeated_output(self):
        _, results = self.check(
            region("x", "buf0 = torch.neg(x, out=new(4))", "return (None, buf0, 7, buf0, 2.5)"),
            lambda: [torch.randn(4)],
            lambda x: (None, -x, 7, -x, 2.5),
        )
        self.assertIs(results[-1][1][1], results[-1][1][3])

    def test_views_of_one_storage(self):
        _, results = self.check(
            region("x", "buf0 = torch.neg(x, out=new(4, 4))", "return (buf0[1:], buf0.t(), buf0)"),
            lambda: [torch.randn(4, 4)],
            lambda x: ((-x)[1:], (-x).t(), -x),
        )
        a, b, c = results[-1][1]
        self.assertEqual({t.untyped_storage().data_ptr() for t in (a, b, c)}, {c.data_ptr()})

    def test_view_of_another_type(self):
        self.check(
            region("x", "buf0 = torch.neg(x, out=new(4))", "return (buf0.view(torch.int32)[1:], x.view(torch.int32))"),
            lambda: [torch.randn(4)],
            lambda x: ((-x).view(torch.int32)[1:], x.view(torch.int32)),
        )

    def test_input_and_views_of_it(self):
        _, results = self.check(
            region(
                "x, y",
                "buf0 = torch.add(x, y, out=new(4, 4))",
                "return (buf0, x, y.t(), torch.as_strided(y, (2,), (3,), 4))",
            ),
            lambda: [torch.randn(4, 4), torch.randn(4, 4)],
            lambda x, y: (x + y, x, y.t(), torch.as_strided(y, (2,), (3,), 4)),
        )
        (x, y), (_, same, transposed, _) = results[-1]
        self.assertIs(same, x)
        self.assertEqual(transposed.data_ptr(), y.data_ptr())

    def test_view_of_an_input_that_is_itself_a_view(self):
        self.check(
            region(
                "x",
                "buf0 = torch.neg(x, out=new(2, 4))",
                "return (buf0, torch._C._dynamo.guards._reinterpret_tensor(x, (4,), (1,), 4))",
            ),
            lambda: [torch.randn(6, 4)[4:]],
            lambda x: (-x, x[1]),
        )

    def test_storage_that_an_operator_allocates(self):
        run, results = self.check(
            region(
                "x",
                "buf0 = torch.ops.aten.sort.default(x)",
                "buf1 = buf0[0]",
                "buf2 = buf0[1]",
                "buf3 = torch.mul(buf1, 2, out=new(4))",
                "return (buf3, buf2, buf1)",
            ),
            lambda: [torch.randn(4)],
            lambda x: (x.sort()[0] * 2, x.sort()[1], x.sort()[0]),
        )
        (state,) = run.states.values()
        self.assertNotIn("aten.copy_.default", [node.name for node in state.relaunch.template.nodes])

    def test_first_call_tells_where_outputs_are_made(self):
        """Also if a kernel was tuned in it: what is called for that is not counted."""
        tuner = {"__name__": "torch._inductor.runtime.triton_heuristics", "torch": torch}
        exec("def tune(x):\n    return x.clone() + x.sort()[0]", tuner)
        to_tune = [tuner["tune"]]
        run = self.runner(
            region(
                "x",
                "if to_tune:",
                "    to_tune.pop()(x)",
                "buf0 = torch.ops.aten.sort.default(x)",
                "buf1 = torch.ops.aten.neg.default(buf0[0])",
                "return (buf1, buf0[1])",
            ),
            to_tune=to_tune,
        )
        with mock.patch.object(capture.Capture, "run", autospec=True, side_effect=capture.Capture.run) as captures:
            for _ in range(3):
                x = torch.randn(4)
                out, index = run([x])
                self.assertEqual((out, index), (-x.sort()[0], x.sort()[1]))
        self.assertEqual(to_tune, [])
        self.assertEqual(captures.call_count, 2)
        (state,) = run.states.values()
        self.assertNotIn("aten.copy_.default", [node.name for node in state.relaunch.template.nodes])

    def test_output_that_is_made_where_an_input_was(self):
        """It is no input, and the first capture places it."""
        where = []

        def allocate(*args):
            made = self.device.empty(*args)
            return tensor_at(where.pop(), *args) if where and args[0] != (2,) else made

        run = self.runner(
            region(
                "x",
                "buf0 = torch.sub(x[:2], x[2:], out=new(2))",
                "del x",
                "buf1 = torch.cat([buf0, buf0], out=new(4))",
                "return (buf1,)",
            ),
            empty_strided_cuda=allocate,
        )
        for n in range(4):
            x = torch.randn(4)
            wanted = torch.cat([x[:2] - x[2:]] * 2)
            where += [x.data_ptr()] * (not n)
            self.assertEqual(run([x])[0], wanted)
        self.assertEqual((where, self.counted("relaunches")), ([], 3))
        self.assertEqual(len(self.device.random), 2, "two captures: the program, and the proof")

    def test_storage_that_nobody_placed_is_refused(self):
        """Allocated after the back of generated code and of operators: here by a function that keeps its name."""
        source = """
allocate = empty_strided_cuda
def region(args):
    x, = args
    args.clear()
    buf0 = allocate((4,), (1,), torch.float32)
    torch.neg(x, out=buf0)
    return (buf0, buf0[1:3])
"""
        run, x = self.runner(source), torch.randn(4)
        for _ in range(3):
            self.assertEqual(run([x]), (-x, (-x)[1:3]))
        (refusal,) = causes.refusals()
        self.assertIn("[output]: an output's memory can't be told from temporary memory", refusal)

    def test_empty_zero_dimensional_and_expanded(self):
        self.check(
            region(
                "x, e, z",
                "buf0 = empty_strided_cuda((), (), torch.float32)",
                "torch.add(z, 1, out=buf0)",
                "buf1 = new(0, 3)",
                "buf2 = empty_strided_cuda((3, 2), (1, 4), torch.float32)",
                "buf2.copy_(x)",
                "return (buf0, buf1, buf2, e, buf0.expand(3))",
            ),
            lambda: [torch.randn(3, 2), torch.empty(0, 5), torch.randn(())],
            lambda x, e, z: (
                z + 1,
                torch.empty(0, 3),
                torch.empty_strided((3, 2), (1, 4)).copy_(x),
                e,
                (z + 1).expand(3),
            ),
        )

    def test_types(self):
        for dtype in (torch.complex64, torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.int8):
            with self.subTest(dtype):
                counters.clear()
                self.check(
                    region("x", "buf0 = new(4, 8, dtype=x.dtype)", "buf0.copy_(x)", "return (buf0, buf0[1])"),
                    lambda dtype=dtype: [torch.randint(0, 2, (4, 8)).to(dtype)],
                    lambda x: (x, x[1]),
                )

    def test_tensor_of_the_module(self):
        constant = torch.arange(4.0)
        _, results = self.check(
            region("x", "buf0 = torch.add(x, constant, out=new(4))", "return (buf0, constant)"),
            lambda: [torch.randn(4)],
            lambda x: (x + constant, constant),
            constant=constant,
        )
        self.assertIs(results[-1][1][1], constant)

    def test_saved_outputs_share_one_allocation(self):
        source = region(
            "x",
            "buf0 = torch.neg(x, out=new(4))",
            "buf1 = torch.mul(x, 2, out=new(4))",
            "buf2 = new(2, 4, dtype=torch.int64)",
            "torch.ops.aten.fill_(buf2, 3)",
            "return (buf0, buf1, buf2, x)",
        )
        _, results = self.check(
            source, lambda: [torch.randn(4)], lambda x: (-x, x * 2, torch.full((2, 4), 3), x), saved=[1, 2, 3]
        )
        visible, first, second, _ = results[-1][1]
        self.assertEqual(first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr())
        self.assertNotEqual(visible.untyped_storage().data_ptr(), first.untyped_storage().data_ptr())
        self.assertEqual(visible.untyped_storage().nbytes(), 16)

    def test_output_that_can_not_be_made(self):
        """No memory for one of no elements, or memory that can't be viewed as what is saved."""
        source = region(
            "x",
            "buf0 = torch.neg(x, out=new(4))",
            "buf1 = torch.mul(x, 2, out=new(4))",
            "return (buf0, buf1, empty_strided_cuda((0, 3), (3, 1), torch.float32))",
        )
        allocate, fails = self.device.empty, set()

        def empty(size, stride, dtype):
            if size == (0, 3) and "memory" in fails:
                raise torch.OutOfMemoryError("no memory")
            odd = dtype is torch.uint8 and "view" in fails
            return allocate((size[0] + 1,) if odd else size, stride, dtype)

        self.device.empty = empty
        run, x = self.runner(source, saved=[0, 1]), torch.randn(4)
        for fails_at, error in (("", None), ("", None), ("memory", "no memory"), ("view", "divisible"), ("", None)):
            fails.clear()
            fails.add(fails_at)
            inputs = [x]
            if error is None:
                self.assertEqual(run(inputs)[0], -x)
            else:
                with self.assertRaisesRegex(RuntimeError, error):
                    run(inputs)
                self.assertIs(inputs[0], x)


class TestAlignment(RelaunchTestCase):
    def at(self, skew, base=None):
        storage = torch.empty(1024, dtype=torch.uint8)
        start = -storage.data_ptr() % 256 + skew
        return storage[start : start + 64].view(torch.float32).view(4, 4).copy_(torch.randn(4, 4))

    def test_less_aligned_inputs_get_one_more_graph_for_all_of_them(self):
        run = self.runner(ADD)
        for of_x, of_w in ((0, 0), (0, 0), (0, 0), (16, 0), (32, 0), (0, 48), (16, 16), (0, 0)):
            self.add(run, x=self.at(of_x), w=self.at(of_w))
        self.assertEqual(self.counted("captures"), 2)
        self.assertEqual(self.counted("relaunches"), 7)

    def test_less_aligned_input_whose_first_capture_fails(self):
        """It is tried again, for there is only a graph for other alignments."""
        run = self.runner(ADD)
        for i, skew in enumerate((0, 0, 16, 16, 16, 0)):
            self.device.fail_captures = 1 if i == 2 else 0
            self.add(run, x=self.at(skew), w=self.at(0))
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (2, 4))
        self.assertEqual(run.outside, {"warm-up": 1, "busy": 1})

    def test_less_aligned_input_whose_capture_is_refused(self):
        """The graph for aligned inputs stays."""
        run = self.runner(ADD)
        for skew in (0, 0, 16, 0, 16, 0):
            self.device.kept = [512] if skew else []
            self.add(run, x=self.at(skew), w=self.at(0))
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 3))
        self.assertEqual([r.code for r in causes.refused()], ["kept"])
        self.assertEqual(run.outside, {"warm-up": 1, "kept": 2})

    def test_less_aligned_input_while_another_thread_captures(self):
        run = self.runner(ADD)
        for skew in (0, 0):
            run([self.at(skew), self.at(0)])
        with make_graph.capturing:
            run([self.at(16), self.at(0)])
        for skew in (16, 16):
            self.add(run, x=self.at(skew), w=self.at(0))
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (2, 3))

    def test_misaligned_input_is_copied(self):
        """It is read, and not written."""
        for skews in ((0, 0, 4, 12, 0), (4, 4, 12, 0)):
            counters.clear()
            run = self.runner(ADD)
            for skew in skews:
                x, w = self.at(skew), self.at(4)
                versions = x._version, w._version
                self.add(run, x=x, w=w)
                self.assertEqual((x._version, w._version), versions)
            self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, len(skews) - 1))

    def test_misaligned_static_input_stays_where_it_is(self):
        """The region was compiled for it."""
        source = region(
            "x, w", "assert w.data_ptr() % 16 == 4", "w.add_(x)", "buf0 = torch.neg(w, out=new(4, 4))", "return (buf0,)"
        )
        run = self.runner(source, static=[1], mutated=[1])
        w = self.at(4)
        with mock.patch.object(compiled_region, "clone_flat", side_effect=AssertionError("it is copied")):
            for _ in range(4):
                x = torch.randn(4, 4)
                wanted = w + x
                self.assertEqual(run([x, w])[0], -wanted)
                self.assertEqual(w, wanted)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 3))

    def test_misaligned_input_that_is_written(self):
        run = self.runner(region("x", "assert x.data_ptr() % 16 == 0", "x.add_(1)", "return (x.t(),)"), mutated=[0])
        for skew in (4, 4, 0, 8, 4):
            x = self.at(skew)
            wanted = x + 1
            (view,) = run([x])
            self.assertEqual((x, view), (wanted, wanted.t()))
        self.assertEqual(view.data_ptr(), x.data_ptr())

    def test_misaligned_input_that_a_partition_returns_and_the_next_one_writes(self):
        first = self.runner(region("x", "return (x.sum(), x)"), mutated=[0])
        second = self.runner(region("x", "x.add_(1)", "return ()"), mutated=[0])
        for skew in (4, 4, 0, 8, 4):
            x = self.at(skew)
            wanted = x + 1
            _, same = first([x])
            second([same])
            self.assertIs(same, x)
            self.assertEqual(x, wanted)

    def test_misaligned_input_that_is_written_beside_a_view_of_it(self):
        """An earlier partition made the view: the graph may have either address where it writes."""
        for names, written in (("view, x", 1), ("x, view", 0)):
            run = self.runner(region(names, "x.add_(1)", "return (view.sum(),)"), mutated=[written])
            for skew in (0, 0, 4, 8, 0, 4):
                x = self.at(skew)
                wanted = x + 1
                inputs = [x.t().view(torch.int32)] * 2
                inputs[written] = x
                self.assertEqual(run(inputs)[0], wanted.view(torch.int32).sum())
                self.assertEqual(x, wanted)

    def test_misaligned_inputs_in_one_memory_that_are_read_are_copied_apart(self):
        run = self.runner(region("x, y", "return (x + y,)"))
        with mock.patch.object(compiled_region, "clone_together", side_effect=AssertionError("together")):
            for skew in (0, 0, 4):
                x = self.at(skew)
                self.assertEqual(run([x, x.t()])[0], x + x.t())

    def test_misaligned_buffer_that_a_partition_writes(self):
        """What an operator between two graphs returned is no input of the whole code."""
        graph = SimpleNamespace(partition_maps=[GraphPartitionMap(0, [None], [[]], [])])
        kind = {"device_index": 0, "is_backward": False, "is_inference": True}
        code = notes.describe_partition(graph, 0, (), stack_traces=[""], **kind)
        run = self.runner(region("x", "x.mul_(2)", "return (x,)"), mutated=code.mutated_inputs)
        for skew in (4, 0, 4, 8):
            x = self.at(skew)
            wanted = 2 * x
            self.assertEqual(run([x])[0], wanted)

    def test_what_lies_between_the_elements_of_a_misaligned_input_is_not_copied_back(self):
        """Another input may have written it: AOTAutograd has no common base for columns that don't overlap."""
        source = region("x, y", "x.mul_(2)", "y.mul_(3)", "return ()")
        for first, second in ((slice(1, 3), slice(3, 6)), (slice(4, 8), slice(1, 3))):
            run = self.runner(source, mutated=[0, 1])
            for _ in range(4):
                base = torch.arange(32.0).reshape(4, 8)
                wanted = base.clone()
                wanted[:, first] *= 2
                wanted[:, second] *= 3
                run([base[:, first], base[:, second]])
                self.assertEqual(base, wanted)
            self.assertEqual(self.counted("captures"), 1)
            counters.clear()


class TestReplayOfTorch(RelaunchTestCase):
    """A graph that draws random numbers is launched by torch, which knows the generators."""

    def test_launch(self):
        with mock.patch.object(Executable, "direct", False):
            run = self.runner(ADD, static=[1])
            w = torch.randn(4, 4)
            self.add(run, 5, w=w)
        self.assertEqual(relaunch_driver.driver().calls("launch"), [])
        self.assertEqual(self.counted("relaunches"), 4)

    def test_error_of_a_replay(self):
        with (
            mock.patch.object(Executable, "direct", False),
            mock.patch.object(Executable, "replay", mock.Mock(side_effect=RuntimeError("no replay"))),
        ):
            run = self.runner(ADD, static=[1])
            run([torch.randn(4, 4), torch.randn(4, 4)])
            for _ in range(3):
                inputs = [torch.randn(4, 4), torch.randn(4, 4)]
                with self.assertRaisesRegex(RuntimeError, "no replay"):
                    run(inputs)
                self.assertEqual(len(inputs), 2)
        self.assertEqual(causes.refusals(), [])


class TestStream(RelaunchTestCase):
    """Calls that are left to Python: on streams and devices that the driver knows, and a graph's launch doesn't."""

    def call(self):
        """A call of a region that has been relaunched, as it is offered to be made in C. None: it is left to others."""
        self.run = self.warmed(static=[1])
        call = next(iter(self.run.states.values())).relaunch.call
        return lambda: call.try_launch([torch.randn(4, 4), torch.randn(4, 4)])

    def test_stream_that_is_captured_or_broken_is_left_to_the_slow_way(self):
        call = self.call()
        before = self.counted("relaunches")
        for captured, broken in ((7, 0), (0, 7)):
            relaunch_driver.driver().library.stub_streams(captured, broken)
            self.assertIsNone(call())
        self.assertEqual(self.counted("relaunches"), before)
        self.device.captured_by_user = True
        self.add(self.run)
        self.assertEqual(self.counted("relaunches"), before)

    def test_list_of_inputs_that_is_emptied_before_it_is_read(self):
        inputs: list[torch.Tensor] = []
        self.device.stream_of = lambda index: inputs.clear() or 7
        call = next(iter(self.warmed(static=[1]).states.values())).relaunch.call
        inputs += [torch.randn(4, 4), torch.randn(4, 4)]
        self.assertIsNone(call.try_launch(inputs))
        inputs += [torch.randn(4, 4), torch.randn(4, 4)]
        with self.assertRaisesRegex(TypeError, r"launch\(\) wants a list of 2 inputs"):
            call.launch(inputs)

    def select(self, device, context):
        """The thread's device and context, None for none. The context it has now comes back after the test."""
        library, before = relaunch_driver.driver().library, ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(before))
        self.addCleanup(library.cuCtxSetCurrent, before)
        library.cuCtxSetCurrent(ctypes.c_void_p(context))
        self.device.selected = device

    def test_other_device_is_left_to_the_slow_way(self):
        call = self.call()
        self.select(1, 0xBEEF)
        self.assertIsNone(call())
        self.add(self.run)
        self.device.selected = 0
        self.assertIsNotNone(call())

    def test_device_is_known_by_the_context(self):
        """Torch is asked for it where another context is current, or none was."""
        call = self.call()
        library = relaunch_driver.driver().library
        for forget, asked in ((lambda: None, 0), (library.forget_context, 1), (lambda: None, 0)):
            forget()
            before = self.device.asked
            self.assertIsNotNone(call())
            self.assertEqual(self.device.asked - before, asked)

    def test_thread_without_a_context_keeps_its_device(self):
        """To give it the executable's would be to select that device for good."""
        call = self.call()
        driver = relaunch_driver.driver()
        self.select(1, None)
        driver.take()
        self.assertIsNone(call())
        self.assertEqual(driver.take(), [])
        self.device.selected = 0
        self.assertIsNotNone(call())
        self.assertEqual(driver.take()[0][0], "context")


class TestRandomNumbers(RelaunchTestCase):
    """The generators' memory needs a GPU; what is found out before does not."""

    DRAWS = region(
        "x, g",
        "if times:",
        "    (g or default).offset += times.pop()",
        "buf0 = torch.neg(x, out=new(4))",
        "return (buf0,)",
    )

    def test_capture_knows_whether_the_region_draws(self):
        for hazard, generator, times, draws in (
            ("it draws none", None, [], False),
            ("default generator", None, [4], True),
            ("generator that is an input", Generator(), [4], True),
        ):
            with self.subTest(hazard):
                self.device.random.clear()
                self.device.generator.offset = 0
                run = self.runner(self.DRAWS, default=self.device.generator, times=times)
                for _ in range(3):
                    x = torch.randn(4)
                    self.assertEqual(run([x, generator])[0], -x)
                self.assertEqual(self.device.random, [draws] * 2)
                self.assertEqual(self.device.generator.offset, 0 if generator or not draws else 4)

    def test_words_of_a_generator_are_fixed(self):
        from torch_overlay._inductor.relaunch.proof.nodes import FIXED

        recording = self.device.new_recording(1)
        recording.fixed = [64, 128]
        plan, code = AllocationPlan(random=True), CodeFacts("region", 0)
        request = capture.CaptureRequest(self.device, lambda args: args, [torch.ones(4)], [64], plan, code)
        segments = capture.Capture(request, recording).run().segments
        recording.close()
        found = [(s.address, s.size, s.delta) for s in segments if s.region == FIXED]
        self.assertEqual(found, [(64, 8, 0), (128, 8, 8)])


class TestFailures(RelaunchTestCase):
    def test_region_that_keeps_what_it_allocated_is_refused(self):
        """So does one that draws random numbers and did not at its first call."""
        run = self.runner(ADD)
        self.device.kept = [512, 512]
        self.add(run, 4)
        (refusal,) = causes.refusals()
        self.assertIn("[kept]: 1024 bytes that it allocated are still in use when it has ended", refusal)
        self.assertEqual(len(self.device.random), 1)

    def test_capture_that_fails_is_tried_again(self):
        run = self.runner(ADD)
        self.device.fail_captures = 1
        self.add(run, 5)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 3))
        self.assertEqual(causes.refusals(), [])

    def test_capture_that_keeps_failing_is_given_up(self):
        run = self.runner(ADD)
        self.device.fail_captures = 100
        self.add(run, 8)
        self.assertEqual(self.device.fail_captures, 94)  # each time once more, to see in which operator
        self.assertEqual(
            causes.refusals(), ["a region runs without a CUDA graph [capture]: RuntimeError: the driver has the flu"]
        )
        self.assertEqual(self.counted("refusals"), 1)

    def test_recording_whose_addresses_cannot_be_freed_leaves_the_others_closed(self):
        made = [mock.Mock(close=mock.Mock(side_effect=error)) for error in (None, RuntimeError("no"), None)]
        request = mock.Mock(inputs=[], **{"device.new_recording.side_effect": made})
        with self.assertRaisesRegex(RuntimeError, "no"), make_graph.recordings(request) as new_recording:
            for gap in (1, 2, 3):
                new_recording(gap)
        self.assertEqual([recording.close.call_count for recording in made], [1, 1, 1])

    def test_exception_of_the_region_reaches_the_caller_and_leaves_nothing(self):
        run = self.runner(
            ADD.replace("    buf1 =", "    if fail:\n        raise ValueError('no')\n    buf1 =", 1), fail=[]
        )
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        run.region.model.__globals__["fail"].append(1)
        with self.assertRaisesRegex(ValueError, "no"):
            run([x, w])
        run.region.model.__globals__["fail"].clear()
        run([x, w])
        run.region.model.__globals__["fail"].append(1)
        with self.assertRaisesRegex(ValueError, "no"):  # the capture fails, and then the compiled code
            run([x, w])
        run.region.model.__globals__["fail"].clear()
        self.add(run, 3, x=x, w=w)
        self.assertEqual(self.counted("captures"), 1)

    def test_region_whose_launches_differ_is_refused(self):
        run = self.runner(
            ADD.replace("    buf1 =", "    next(more)()\n    buf1 ="),
            more=iter([int, int, lambda: torch.ones(2).neg_(), int, lambda: torch.ones(2).neg_(), int, int]),
        )
        self.add(run, 3)
        self.assertRegex(causes.refusals()[0], r"\[(nodes|layout)\]")

    def test_sparse_input_is_refused(self):
        for kind in ("sparse_coo", "sparse_csr"):  # which has no strides
            causes._refused.clear()
            run = self.runner(region("x", "return (x.to_dense(),)"))
            for _ in range(3):
                self.assertEqual(run([torch.eye(2).to_sparse(layout=getattr(torch, kind))])[0], torch.eye(2))
            self.assertIn(f"[input]: input 0 is not a plain tensor: torch.{kind}", causes.refusals()[0])

    def test_output_with_a_bit_that_its_memory_does_not_show_is_refused(self):
        """Inductor calls aten._conj for x.conj(): the result has the memory of x, and a bit."""
        source = region("x", "buf0 = torch.mul(x, 2, out=new(4, dtype=torch.complex64))", "return ({},)")
        for text in ("aten._conj.default(buf0)", "aten._neg_view.default(buf0)", "aten._conj.default(buf0 + 1)"):
            causes._refused.clear()
            run = self.runner(source.format(text))
            for _ in range(3):
                x = torch.full((4,), 1 + 2j)
                wanted = eval(text, {"buf0": 2 * x, "aten": torch.ops.aten})
                self.assertEqual(run([x])[0].resolve_conj().resolve_neg(), wanted.resolve_conj().resolve_neg())
            self.assertIn("[output]: output 0 is not a plain tensor", causes.refusals()[0])

    def test_sparse_input_is_no_seed_of_attention(self):
        run = self.runner(region("x", "return (x.to_dense(),)"))
        x = torch.ones(1, dtype=torch.int64)
        for _ in range(3):
            self.assertEqual(run([x.to_sparse()])[0], x)

    def test_refusal_names_the_line_and_raises_if_asked_to(self):
        code = CodeFacts("forward of compiled frame 0/0", 0, source="model.py:3: y = x.item()")
        with (
            torch._inductor.config.patch("triton.cudagraph_or_error", True),
            self.assertRaisesRegex(RuntimeError, r"\[node-kind\]: why \(the region begins at model.py:3: y = x.item"),
        ):
            causes.refuse(causes.Refused.of("node-kind", "why", region=code))


class TestFirstLaunchWithCopies(RelaunchTestCase):
    """A driver may refuse to make anything of copies to or from the host: the first launch shows it."""

    def run_with(self, error, calls=4):
        """Calls of a region whose first launch raises the error; what they raised."""
        self.enterContext(mock.patch.object(relaunch, "moving", lambda template: {"a copy"}))
        self.enterContext(mock.patch.object(Executable, "direct", False))
        run, raised, errors = self.runner(ADD), [], [error]
        replay = Executable.replay

        def failing(executable):
            if errors:
                raise errors.pop()
            replay(executable)

        with mock.patch.object(Executable, "replay", failing):
            for _ in range(calls):
                x, w = torch.randn(4, 4), torch.randn(4, 4)
                inputs = [x, w]
                try:
                    self.assertEqual(run(inputs)[0], x * w + x)
                except RuntimeError as e:
                    raised.append(str(e))
                    self.assertEqual(inputs, [x, w])
        return raised

    def test_refused_copies(self):
        self.assertEqual(self.run_with(RuntimeError("no such copy")), [])
        (refusal,) = causes.refusals()
        self.assertIn("[host-memory]: its copies can't be patched: no such copy", refusal)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 0))

    def test_copies_that_are_refused_at_a_later_launch(self):
        run, error = self.runner(ADD), DriverError(COPY_SETTER, 1, "no such copy")
        for i in range(4):
            if i == 2:
                (state,) = run.states.values()
                graph, run.states.try_launch = state.relaunch, None
                graph.try_launch, graph.launch = mock.Mock(return_value=None), mock.Mock(side_effect=error)
            self.add(run)
        graph.launch.assert_called_once()
        self.assertEqual(([r.code for r in causes.refused()], state.relaunch), (["host-memory"], None))

    def test_out_of_memory(self):
        self.assertEqual(self.run_with(torch.OutOfMemoryError("no memory")), ["no memory"])
        self.assertEqual(causes.refusals(), [])
        self.assertEqual(self.counted("relaunches"), 2)

    def test_refused_copies_after_out_of_memory(self):
        """The launch after the one that found no memory is the first."""
        copies_refused, seen = RuntimeError("no such copy"), []

        def replay(executable):
            seen.append(executable)
            raise copies_refused

        with mock.patch.object(Executable, "replay", replay):
            self.assertEqual(self.run_with(torch.OutOfMemoryError("no memory")), ["no memory"])
        self.assertEqual(([r.code for r in causes.refused()], len(seen)), (["host-memory"], 1))


class TestVerify(RelaunchTestCase):
    def test_wrong_pointer_is_found_and_named(self):
        run = self.warmed(verify=True)
        (state,) = run.states.values()
        relaunch, other = state.relaunch.relaunch, torch.randn(4, 4)
        relaunch.launch = lambda inputs, originals=None: relaunch.call.launch([other, inputs[1]], inputs)
        with self.assertRaises(VerifyError) as raised:
            run([torch.randn(4, 4), torch.randn(4, 4)])
        message = str(raised.exception)
        self.assertRegex(message, r"a region: output 0 of the relaunched graph is not .*: \d+ of 16 values differ")
        self.assertIn("its address: node 1 (aten.add.out), parameter 2, offset 0", message)

    def test_differences(self):
        nan = float("nan")
        self.assertIsNone(describe_difference(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])))
        self.assertIsNone(describe_difference(torch.tensor([1000.0]), torch.tensor([1000.0001])))
        self.assertIsNone(describe_difference(None, None))
        self.assertIn("first at (1,): 3.0", describe_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])))
        self.assertIn("1 of 2", describe_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, nan])))
        self.assertIn("strides", describe_difference(torch.ones(2, 2), torch.ones(2, 2).t()))
        self.assertIn("shape", describe_difference(torch.ones(2), torch.ones(3)))
        a = torch.tensor([1, 2], dtype=torch.complex64)
        self.assertIsNone(describe_difference(a, a.clone()))
        self.assertIsNotNone(describe_difference(a, a * 1j))


class TestPolicy(TestCase):
    """What Inductor is given, in a compilation for a simulated GPU."""

    def compiled(self, mode, fn, make, backward=False):
        """What was described for relaunches, and how many graphs were made of either kind."""
        with simulated_gpu(), config.patch(cudagraphs=mode):
            made = compile_only(fn, *make(), mode="reduce-overhead", backward=backward).cudagraphs
        return [graph["relaunch"] for graph in made if "relaunch" in graph], len(made)

    def test_forward_and_backward(self):
        def fn(x, w):
            return (x @ w).relu().sin()

        def args():
            return torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda", requires_grad=True)

        (forward, backward), _ = self.compiled("relaunch", fn, args, backward=True)
        self.assertEqual((forward.is_backward, backward.is_backward), (False, True))
        self.assertRegex(forward.name, r"^forward of compiled frame \d+/\d+$", "there is one partition")
        self.assertTrue(forward.saved_outputs)
        self.assertEqual(len(forward.saved_outputs), 2)
        self.assertEqual(backward.saved_outputs, frozenset())
        self.assertIn("(x @ w).relu().sin()", forward.source)

    def test_output_that_is_also_saved_is_the_users(self):
        """Nothing else may keep its memory."""

        def args():
            return torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda", requires_grad=True)

        (forward, _), _ = self.compiled("relaunch", lambda x, w: (x @ w).exp(), args, backward=True)
        self.assertEqual(forward.saved_outputs, frozenset([1]), "what is the result and its own derivative is output 0")
        with torch._inductor.config.patch(graph_partition=False):
            (forward, _), _ = self.compiled("relaunch", lambda x, w: (x @ w).exp(), args, backward=True)
        self.assertEqual(forward.saved_outputs, frozenset([1, 2]))

    def test_outputs_are_saved_by_a_forward(self):
        """Gradients after those that somebody looks at, and bases of views, are not."""
        CompiledNotes(visible_outputs=(0,)).put(graph := SimpleNamespace())
        for backward, inference, saved in ((False, False, {1, 2}), (True, False, ()), (False, True, ())):
            known = {"device_index": 0, "is_backward": backward, "is_inference": inference}
            code = notes.describe(graph, (), stack_traces=[""] * 3, **known)
            self.assertEqual(code.saved_outputs, frozenset(saved))

    def test_trees_and_off(self):
        def args():
            return (torch.randn(64, 64, device="cuda"),)

        self.assertEqual(self.compiled("trees", torch.sin, args), ([], 1))
        self.assertEqual(self.compiled("off", torch.sin, args), ([], 0))

    def test_backward_follows_its_forward(self):
        box = SimpleNamespace(value=0)
        with config.patch(cudagraphs="relaunch"):
            hooks.chosen_mode(box)
        with config.patch(cudagraphs="trees"):
            self.assertEqual(hooks.chosen_mode(box), "relaunch")

    def test_no_generations_without_trees(self):
        called = []
        for ours in (hooks.RELAUNCH, None):
            with inductor_config.patch(cudagraph_policy=ours):
                hooks.maybe_handle_backward_generation(lambda *a: called.append(a), "graph", "box")
        self.assertEqual(called, [("graph", "box")])

    def test_source_line(self):
        trace = '  File "/a/model.py", line 3, in forward\n    y = f(x)\n'
        trace += '  File "/a/b.py", line 9, in f\n    return x.sin()\n'
        self.assertEqual(notes.source_line(trace), "/a/b.py:9: return x.sin()")
        self.assertEqual(notes.source_line("nothing"), "")
        inside = [f'  File "{torch.__file__}", line {n}, in f\n    g({n})\n' for n in (3, 9)]
        self.assertEqual(notes.source_line("".join(inside)), f"{torch.__file__}:9: g(9)", "nothing is the user's")
        self.assertEqual(notes.source_line(trace + inside[0]), "/a/b.py:9: return x.sin()")
        entered = f'  File "{contextlib.__file__}", line 137, in __enter__\n    return next(self.gen)\n'
        self.assertEqual(notes.source_line(trace + entered), "/a/b.py:9: return x.sin()")

    def test_refusal_is_logged_once(self):
        causes._refused.clear()
        counters.clear()
        with self.assertLogs(causes.log, "WARNING") as logs:
            for name in ("a", "b", "a"):
                causes.refuse(causes.Refused.of("kept", "why", region=CodeFacts(name, 0)))
        self.assertEqual([r.region.name for r in causes.refused()], ["a", "b"])
        self.assertEqual((len(logs.output), counters["torch_overlay"]["cudagraph_refusals"]), (2, 3))


@form.needs_gpu
class TestGpu(GpuTestCase):
    """Operators that a capture can't see or take, and what one leaves behind; `relaunch_programs` has the others."""

    def setUp(self):
        super().setUp()
        torch.manual_seed(0)

    def test_random_numbers_that_the_first_call_did_not_draw(self):
        drawing = []
        with torch.library._scoped_library("relaunch_test", "FRAGMENT") as library:
            fn = lambda x: x + torch.rand_like(x) if drawing else x.clone()  # noqa: E731
            define(library, "perhaps(Tensor x) -> Tensor", fn, device="CUDA")
            x = torch.zeros(64, device="cuda")
            with config.patch(cudagraphs="relaunch"):
                compiled = torch.compile(lambda x: torch.ops.relaunch_test.perhaps(x) + 0, mode="reduce-overhead")
                self.assertEqual(compiled(x), x)
                drawing.append(True)
                for _ in range(3):
                    self.assertTrue(0 < float(compiled(x).mean()) < 1)
        self.assertEqual([r.code for r in causes.refused()], ["kept"], causes.refusals())

    def test_region_that_keeps_its_memory(self):
        kept = []
        with torch.library._scoped_library("relaunch_test", "FRAGMENT") as library:
            define(library, "cached(Tensor x) -> Tensor", lambda x: kept.append(x * 2) or kept[-1] + 1, device="CUDA")
            x = torch.ones(64, device="cuda")
            with config.patch(cudagraphs="relaunch"):
                compiled = torch.compile(lambda x: torch.ops.relaunch_test.cached(x) + 0, mode="reduce-overhead")
                for _ in range(4):
                    self.assertEqual(compiled(x), torch.full((64,), 3.0, device="cuda"))
        del kept[:]
        self.assertEqual([r.code for r in causes.refused()], ["kept"], causes.refusals())

    def test_a_capture_leaves_the_allocator_as_it_was(self):
        x = torch.randn(1 << 24, device="cuda")
        with config.patch(cudagraphs="relaunch"):
            compiled = torch.compile(lambda x: (x + 1).cumsum(0) * 2, mode="reduce-overhead")
            compiled(x)
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
            compiled(x)
            torch.cuda.synchronize()
            after = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        self.assertEqual(counters["torch_overlay"]["cudagraph_relaunches"], 1, causes.refusals())
        self.assertEqual(after[1], before[1])
        self.assertLessEqual(after[0], before[0] + 2 * x.nbytes)

    def test_kernel_on_a_stream_that_the_operator_chooses(self):
        """No capture sees it, whatever stream it is, and whatever other threads do."""
        own, done = torch.cuda.Stream(), threading.Event()
        busy = threading.Thread(target=lambda: [None for _ in iter(lambda: done.wait(0), True)])
        self.enterContext(fresh_cache())
        busy.start()
        self.addCleanup(busy.join)
        self.addCleanup(done.set)
        for stream in (torch.cuda.default_stream(), own):

            def double(x, stream=stream):
                made = torch.empty_like(x)
                with torch.cuda.stream(stream):
                    torch.mul(x, 2, out=made)
                return made

            name = f"doubles{stream.stream_id}"
            with torch.library._scoped_library("relaunch_test", "FRAGMENT") as library, torch.cuda.stream(stream):
                define(library, f"{name}(Tensor x) -> Tensor", double, device="CUDA")
                operator = getattr(torch.ops.relaunch_test, name)
                with config.patch(cudagraphs="relaunch"):
                    compiled = torch.compile(lambda x, op=operator: op(x + 1) + 1, mode="reduce-overhead")
                    for _ in range(6):
                        x = torch.randn(64, device="cuda")
                        self.assertEqual(compiled(x), 2 * x + 3)
            self.assertIn(f"relaunch_test::{name}.default", split_off.failed())
        self.assertEqual(causes.refusals(), [])  # the operator runs between two graphs

    def test_kernel_on_a_stream_that_the_operator_chooses_in_memory_of_its_own(self):
        """No capture sees it, and it writes to no memory that the capture has placed."""
        kept, current = torch.empty(64, device="cuda"), torch.cuda.current_stream()

        def double(x):
            with torch.cuda.stream(current):
                torch.mul(x, 2, out=kept)
            return kept.clone()

        def rectify(x):
            with torch.cuda.stream(current):
                x.relu_()

        self.enterContext(fresh_cache())
        with torch.library._scoped_library("relaunch_test", "FRAGMENT") as library:
            define(library, "doubles_in_its_own(Tensor x) -> Tensor", double, device="CUDA")
            define(library, "rectifies(Tensor(a!) x) -> ()", rectify, lambda x: None, "CUDA")

            def rectified(x):
                y = x + 1
                torch.ops.relaunch_test.rectifies(y)
                return y + 1

            doubled = torch.ops.relaunch_test.doubles_in_its_own
            for fn, want in (
                (lambda x: doubled(x + 1) + 1, lambda x: 2 * x + 3),
                (rectified, lambda x: (x + 1).relu() + 1),
            ):
                with config.patch(cudagraphs="relaunch"):
                    compiled = torch.compile(fn, mode="reduce-overhead")
                    for _ in range(6):
                        x = torch.randn(64, device="cuda")
                        self.assertEqual(compiled(x), want(x))
        names = {"relaunch_test::doubles_in_its_own.default", "relaunch_test::rectifies.default"}
        self.assertEqual({*split_off.failed()}, names)
        self.assertEqual(causes.refusals(), [])  # they run between two graphs

    def test_region_that_can_not_be_captured_runs_and_the_next_one_is_captured(self):
        with torch.library._scoped_library("relaunch_test", "FRAGMENT") as library:
            define(library, "host_read(Tensor x) -> Tensor", lambda x: x * x.sum().item(), device="CUDA")
            x = torch.ones(4, device="cuda")
            with config.patch(cudagraphs="relaunch"):
                compiled = torch.compile(lambda x: torch.ops.relaunch_test.host_read(x + 1), mode="reduce-overhead")
                for _ in range(6):
                    self.assertEqual(compiled(x), torch.full((4,), 16.0, device="cuda"))
                self.assertFalse(torch.cuda.is_current_stream_capturing())
                self.assertEqual(causes.refusals(), [])  # the operator runs between two graphs
                other = torch.compile(torch.sin, mode="reduce-overhead")
                for _ in range(3):
                    self.assertEqual(other(x), x.sin())
        self.assertEqual(counters["torch_overlay"]["cudagraph_captures"], 2)
