"""The policy that Inductor asks for CUDA graphs gives relaunched ones, and needs nothing else of ours in the process.

All of this runs twice: beside the seams, and by `TestAlone` in a process that has none.
"""

import contextvars
import copy
import functools
import gc
import importlib
import io
import itertools
import pickle
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.test_case import TestCase
from torch._dynamo.utils import counters
from torch._inductor import output_code
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch._inductor.utils import fresh_cache, GraphPartitionMap
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from generated_text import normalised
from stand_ins.relaunch_case import CompilingTestCase, GpuTestCase, RelaunchTestCase, run_in_threads
from stand_ins.relaunch_host import generated, host_as_gpu
from torch_overlay import config, cudagraphs
from torch_overlay._inductor.relaunch import causes, coverage, policy, runners
from torch_overlay._inductor.relaunch.notes import CompiledNotes
from torch_overlay._inductor.relaunch.verify import Verified
from torch_overlay.cudagraphs import RelaunchPolicy
from torch_overlay.testing import compile_only, simulated_gpu


ALONE = not form.PATCHED and not form.overlay.status().enabled
needs_seams = unittest.skipIf(ALONE, "needs a seam")
POLICY = RelaunchPolicy()
POLICIES = (POLICY,) if ALONE else (POLICY, None)  # None: the overlay has Inductor ask its own


def step(x, w):
    return (x @ w).sin() + x


# As Inductor generates it where an operator between two partitions is split off.
PARTITIONED = """
def partition_0(args):
    x, w = args
    args.clear()
    buf0 = empty_strided_cuda((4,), (1,), torch.float32)
    torch.mul(x, w, out=buf0)
    return (buf0,)

def partition_1(args):
    buf1, x = args
    args.clear()
    x.add_(buf1)
    buf2 = empty_strided_cuda((4,), (1,), torch.float32)
    torch.sin(x, out=buf2)
    return (buf2,)

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        self.partitions = [fn(partition) for fn, partition in zip(fns, self.partitions)]

    def call(self, args):
        w, x = args
        args.clear()
        (buf0,) = self.partitions[0]([x, w])
        (buf2,) = self.partitions[1]([buf0.sort().values, x])
        return (buf2,)

runner = Runner([partition_0, partition_1])
call, recursively_apply_fns = runner.call, runner.recursively_apply_fns
"""


class Modules(pickle.Unpickler):
    """Notes the modules of what is pickled."""

    def __init__(self, *args):
        super().__init__(*args)
        self.modules = set()

    def find_class(self, module, name):
        self.modules.add(module)
        return super().find_class(module, name)


class TestOnTheHost(RelaunchTestCase):
    """torch.compile, from the user's function to relaunches that the stand-in device runs."""

    def setUp(self):
        super().setUp()
        self.made = self.enterContext(host_as_gpu(self.device))
        self.enterContext(inductor_config.patch(cudagraph_policy=POLICY))

    def check(self, fn, make, calls=5, expected=None, **options):
        """Results are those of eager, and the policy's graphs were launched from the second call on."""
        compiled = torch.compile(fn, **options or {"mode": "reduce-overhead"})
        for _ in range(calls):
            args = make()
            copies = copy.deepcopy(args)
            self.assertEqual(compiled(*args), fn(*copies))
            self.assertEqual(args, copies)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), expected or (1, calls - 1))
        self.assertEqual(causes.refusals(), [])
        return compiled

    def train(self, fn, sizes, **options):
        compiled = torch.compile(fn, mode="reduce-overhead", **options)
        w = torch.randn(8, 8, requires_grad=True)
        for n in sizes:
            x = torch.randn(n, 8)
            got, wanted = (torch.autograd.grad(f(x, w).sum(), w) for f in (compiled, fn))
            self.assertEqual(got, wanted)

    def test_inference(self):
        w = torch.randn(8, 8)
        self.check(step, lambda: (torch.randn(8, 8), w))

    def test_switch_of_inductor(self):
        with inductor_config.patch({"triton.cudagraphs": True}):
            self.check(step, lambda: (torch.randn(8, 8), torch.randn(8, 8)), dynamic=False)

    def test_nobody_asked(self):
        self.check(step, lambda: (torch.randn(8, 8), torch.randn(8, 8)), expected=(0, 0), dynamic=False)

    def test_training(self):
        self.train(step, [8] * 5)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (2, 8))
        forward, backward = self.made
        self.assertTrue(forward.code.saved_outputs)
        self.assertTrue(backward.code.is_backward)

    def test_backward_that_is_compiled_when_it_runs(self):
        """As one is whose saved tensors have sizes that change."""
        self.train(step, [3, 5, 5, 7, 7], dynamic=True)
        self.assertEqual([each.code.is_backward for each in self.made].count(True), 1)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (4, 4))

    def test_mutated_input(self):
        def fn(cache, x):
            cache.add_(x)
            return cache * 2

        self.check(fn, lambda: (torch.randn(8), torch.randn(8)))
        (made,) = self.made
        self.assertEqual(made.code.mutated_inputs, (0,))

    def test_static_inputs(self):
        module = torch.nn.Linear(8, 8).requires_grad_(False)
        self.check(module, lambda: (torch.randn(8, 8),))
        (made,) = self.made
        self.assertEqual(len(made.code.static_inputs), 2)

    def test_functions_and_threads_share_it(self):
        """A configuration belongs to a thread, so each gets a copy of this one's."""
        failed = []

        def work(factor):
            try:
                fn = torch.compile(lambda x: (x * factor).cos(), mode="reduce-overhead")
                for _ in range(8):
                    x = torch.randn(8)
                    torch.testing.assert_close(fn(x), (x * factor).cos())
            except Exception as error:
                failed.append(repr(error))

        run_in_threads(*[functools.partial(contextvars.copy_context().run, work, n) for n in (2.0, 3.0, 4.0)])
        self.assertEqual(failed, [])
        self.assertEqual((len(self.made), self.counted("captures")), (3, 3))

    def test_options(self):
        with config.patch(cudagraph_verify=True, cudagraph_templates=3):
            self.check(step, lambda: (torch.randn(8, 8), torch.randn(8, 8)))
        (made,) = self.made
        (state,) = made.states.values()
        self.assertEqual((type(state.relaunch), made.states.bound), (Verified, 3))

    def test_reset(self):
        """The runners are still referenced, as by a backward yet to run."""
        before = runners.counts()
        self.check(step, lambda: (torch.randn(8, 8), torch.randn(8, 8)))
        self.assertEqual(runners.counts()["templates"], before["templates"] + 1)
        self.assertEqual(len(coverage.coverage().functions), 1)
        torch._dynamo.reset()
        gc.collect()
        self.assertEqual((runners.counts(), coverage.coverage().functions), (before, ()))
        self.assertIsNone(policy._thread.graph)

    def test_code_from_the_cache(self):
        """Another process, or this one after a reset, wraps it anew."""
        caches = inductor_config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True)
        with fresh_cache(), caches[0], caches[1]:
            for hits in range(3):
                self.train(step, [8] * 4)
                self.assertEqual(counters["aot_autograd"]["autograd_cache_hit"], hits)
                self.assertEqual((self.counted("captures"), self.counted("relaunches")), (2 * hits + 2, 6 * hits + 6))
                torch._dynamo.reset()
        forwards = [made.code for made in self.made if not made.code.is_backward]
        self.assertEqual([bool(code.saved_outputs) for code in forwards], [True, not ALONE, not ALONE])

    def test_partitions(self):
        """Each has a graph, and knows its inputs among those of the whole."""
        maps = [GraphPartitionMap(0, [1, 0], [[]], []), GraphPartitionMap(1, [None, 1], [[0]], [])]

        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("w", torch.randn(4))

            def forward(self, x):
                return x.add_((x * self.w).sort().values).sin()

        def compile_to_module(graph):
            graph.codegen()
            graph.cache_key = graph.cache_path = ""
            graph.partition_maps, graph.device_idxs = maps, {0}
            return generated(PARTITIONED, self.device)

        mocks = mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", compile_to_module)
        with inductor_config.patch(graph_partition=True), mocks:
            self.check(Module(), lambda: (torch.randn(4),), expected=(2, 8))
        first, second = (made.code for made in self.made)
        self.assertEqual((first.static_inputs, second.static_inputs), ((1,), ()))
        self.assertEqual((first.mutated_inputs, second.mutated_inputs), ((0,), (0, 1)))
        self.assertEqual([code.name.rpartition(", ")[2] for code in (first, second)], ["partition 0", "partition 1"])

    def test_pickle_has_no_policy(self):
        found = []

        class Keeping(RelaunchPolicy):
            def wrap_output(self, output_code):
                found.append(super().wrap_output(output_code))
                return found[-1]

        with inductor_config.patch(cudagraph_policy=Keeping()):
            self.check(step, lambda: (torch.randn(8, 8), torch.randn(8, 8)))
        (graph,) = found
        self.assertIs(graph.current_callable, self.made[0])
        graph = copy.copy(graph)
        graph.prepare_for_serialization()
        read = Modules(io.BytesIO(pickle.dumps(graph)))
        read.load()
        self.assertIn("torch._inductor.output_code", read.modules)
        self.assertEqual([name for name in read.modules if "overlay" in name or name == __name__], [])

    @form.overlay_only
    def test_another_release_is_refused(self):
        with mock.patch.object(torch, "__version__", "2.14.1"), self.assertRaisesRegex(RuntimeError, "2.15.0.*2.14.1"):
            importlib.reload(cudagraphs)

    def test_policy_is_plain_data(self):
        """Inductor copies its configuration, and sends it to other processes."""
        for made in (copy.deepcopy(POLICY), pickle.loads(pickle.dumps(POLICY))):
            self.assertEqual((type(made), vars(made)), (RelaunchPolicy, {}))

    def test_wrapping_that_ends_with_an_error(self):
        with (
            mock.patch.object(policy, "_wrap", side_effect=KeyError("no wrapping")),
            self.assertRaisesRegex(Exception, "no wrapping"),
        ):
            torch.compile(step, mode="reduce-overhead")(torch.randn(8, 8), torch.randn(8, 8))
        torch._dynamo.reset()
        self.assertIsNone(policy._thread.graph)


class Compiling(CompilingTestCase):
    def compiled(self, fn, *shapes, used=POLICY, **options):
        """What was described for relaunches, and the generated code."""
        return super().compiled(fn, *shapes, cudagraph_policy=used, **options), self.seen.wrappers


class TestCompiled(Compiling):
    def test_code_is_the_same(self):
        """The policy isn't in the keys of caches."""

        def fn(x, w):
            return (x @ w).sin().nonzero().sum() + (x @ w).cos()

        for backward in (False, True):
            made, wrappers = self.compiled(fn, (64, 64), (64, 64), backward=backward)
            self.assertEqual(len(made), 3 if backward else 2)
            _, without = self.compiled(fn, (64, 64), (64, 64), backward=backward, used=None)
            self.assertEqual([*map(normalised, wrappers)], [*map(normalised, without)])

    def test_refused_forward_takes_nothing_from_its_backward(self):
        with simulated_gpu() as gpu, inductor_config.patch(cudagraph_policy=POLICY):
            x = torch.randn(4, device="cuda", requires_grad=True)
            with inductor_config.patch(force_disable_cudagraph_TESTING_ONLY=True):
                y = torch.compile(torch.sin, mode="reduce-overhead")(x)
            y.sum().backward()
            self.assertEqual([graph["relaunch"].is_backward for graph in gpu.cudagraphs], [True])
        self.assertEqual(self.refused(), [("inductor", "forward")])

    @unittest.skipUnless(ALONE, "there are seams")
    def test_no_hook_is_installed(self):
        for function in (output_code.CompiledFxGraph.post_compile, output_code.CompiledFxGraph.__init__):
            self.assertEqual(function.__code__.co_filename, output_code.__file__)

    def test_what_inductor_refuses(self):
        """As without a policy."""
        too_small = "Inductor does not say why" if ALONE else ".*cudagraph_min_partition_size"
        cases = (
            (lambda x: x.sin(), {"force_disable_cudagraph_TESTING_ONLY": True}, "inductor", "force_disable_cudagraph"),
            (
                lambda x: x.sin().nonzero(),
                {"graph_partition": False},
                "inductor",
                r"incompatible op aten.nonzero.default; torch._inductor.config.graph_partition = True",
            ),
            (lambda x: x.nonzero(), {}, "split", "all of it is split off: .*aten.nonzero"),
            (
                lambda x: x.sin(),
                {"triton.cudagraph_min_partition_size": 2},
                "split",
                f"all of it is split off: {too_small}",
            ),
        )
        for used in POLICIES:
            for fn, options, reason, text in cases:
                self.forget_refusals()
                self.assertEqual(self.compiled(fn, used=used, **options)[0], [])
                self.assertEqual(self.refused(), [(reason, "inference")])
                self.assertRegex(causes.refusals()[0], text)
                self.assertIn("test_relaunch_policy.py", causes.refusals()[0])

    def test_graphs_or_an_error(self):
        options = {"force_disable_cudagraph_TESTING_ONLY": True, "triton.cudagraph_or_error": True}
        for used in POLICIES:
            with self.assertRaisesRegex(Exception, "runs without a CUDA graph"):
                self.compiled(torch.sin, used=used, **options)

    def test_nothing_to_launch(self):
        for used, (fn, device) in itertools.product(POLICIES, ((torch.t, "cuda"), (torch.sin, "cpu"))):
            self.assertEqual(self.compiled(fn, used=used, device=device)[0], [])
        self.assertEqual(self.refused(), [])

    def test_calls_of_refused_code_are_counted(self):
        options = {"cudagraph_policy": POLICY, "force_disable_cudagraph_TESTING_ONLY": True}
        with simulated_gpu(), inductor_config.patch(options):
            fn = torch.compile(torch.sin, mode="reduce-overhead")
            for _ in range(3):
                fn(torch.randn(4, device="cuda"))
            (found,) = coverage.coverage().functions
        self.assertEqual([(each.code, each.calls) for each in found.outside], [("inductor", 3)])

    @needs_seams
    def test_regions_are_those_of_the_overlay(self):
        def fn(x, w):
            return (x @ w).sin().nonzero().sum() + (x @ w).cos()

        for backward in (False, True):
            mine, _ = self.compiled(fn, (64, 64), (64, 64), backward=backward)
            ours, _ = self.compiled(fn, (64, 64), (64, 64), backward=backward, used=None)
            self.assertEqual(mine, ours)

    def test_policy_that_asks_ours_for_single_functions(self):
        """It has not told ours of the graph."""

        class Asking(CUDAGraphPolicy):
            def cudagraphify(self, *args, **kwargs):
                return POLICY.cudagraphify(*args, **kwargs)

        (made,), _ = self.compiled(torch.sin, used=Asking())
        self.assertEqual((made.name.partition(" of")[0], made.device), ("inference", 0))
        self.assertEqual(self.refused(), [])

    @pytest.mark.each_hook
    @needs_seams
    def test_bisector_that_turns_a_backward_off(self):
        from torch._inductor.compiler_bisector import CompilerBisector

        asked = iter([False, True])
        with mock.patch.object(
            CompilerBisector, "disable_subsystem", lambda *args: args[1] == "cudagraphs" and next(asked)
        ):
            made, _ = self.compiled(torch.sin, backward=True)
        self.assertEqual([code.is_backward for code in made], [False])
        self.assertEqual(self.refused(), [("inductor", "backward")])


class TestNeeds(Compiling):
    """Note [What a policy can't do] of `policy`: what is missing is refused, and nothing is wrong."""

    def test_control_flow(self):
        def fn(x):
            y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x.sin(),))
            return y + 1

        made, _ = self.compiled(fn)
        self.assertEqual(len(made), 0 if ALONE else 1)
        self.assertEqual([r.message for r in causes.refused()], ["control flow operator: torch.cond"] * ALONE)

    def test_numbers(self):
        with simulated_gpu(), inductor_config.patch(cudagraph_policy=POLICY):
            x = torch.randn(8, device="cuda")
            seen = compile_only(lambda x, n: x * n, x, 3, mode="reduce-overhead", dynamic=True)
        (code,) = (graph["relaunch"] for graph in seen.cudagraphs)
        self.assertEqual(bool(code.numbers), not ALONE)

    def test_operator_that_fails_in_a_capture(self):
        """The frame isn't compiled again, for it would be compiled to the same."""
        (code,), _ = self.compiled(torch.sin)
        self.assertEqual(code.compile_id is None, ALONE)

    def wrapped(self, code, is_inference):
        """True if a function gets a graph that is like this one of generated code."""
        causes._refused.clear()

        def model(inputs):
            return inputs

        graph = SimpleNamespace()
        if not ALONE:
            CompiledNotes().put(graph)
        known = {"device_index": 0, "is_backward": False, "is_inference": is_inference}
        with simulated_gpu(), mock.patch.object(policy._thread, "graph", graph):
            model.__code__ = code.replace(co_freevars=model.__code__.co_freevars)
            made = POLICY.cudagraphify(model, [], [], **known)
        self.assertEqual([r.code for r in causes.refused()], ["policy-alone"] * (made is model))
        return made is not model

    def test_seeds_of_attention(self):
        def call(q, k, v):
            return torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)

        self.assertTrue(self.wrapped(call.__code__, is_inference=True))
        self.assertEqual(self.wrapped(call.__code__, is_inference=False), not ALONE)

    def test_streams(self):
        """As they are in the generated code."""
        with simulated_gpu(), inductor_config.patch(cudagraph_policy=POLICY):
            side = torch.cuda.Stream()

            def fn(x):
                current = torch.cuda.current_stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    y = x @ x
                current.wait_stream(side)
                return y + x

            seen = compile_only(fn, torch.randn(64, 64, device="cuda"), mode="reduce-overhead")
        module = compile(seen.wrappers[0], "generated", "exec")
        (code,) = (each for each in module.co_consts if getattr(each, "co_name", "") == "partition_0")
        self.assertEqual(self.wrapped(code, is_inference=True), not ALONE)


@form.needs_gpu
class TestGpu(GpuTestCase):
    """Beside the seams, and by `TestAlone` without them."""

    def setUp(self):
        super().setUp()
        self.enterContext(inductor_config.patch(cudagraph_policy=POLICY))

    def check(self, fn, make, *, regions=1, calls=5, backward=False):
        with config.patch(cudagraph_verify=True):
            compiled = torch.compile(fn, mode="reduce-overhead")
            for _ in range(calls):
                inputs = make()
                copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
                got, expected = compiled(*inputs), fn(*copies)
                if backward:
                    got.sum().backward()
                    expected.sum().backward()
                    inputs, copies = ([t.grad for t in tensors if t.requires_grad] for tensors in (inputs, copies))
                self.assertEqual([got, *inputs], [expected, *copies], atol=1e-2, rtol=1e-2)
        self.assertEqual(causes.refusals(), [])
        found = counters["torch_overlay"]
        self.assertEqual(found["cudagraph_captures"], regions)
        self.assertEqual(found["cudagraph_relaunches"], regions * (calls - 1))

    def tensors(self, *shapes, grad=False):
        return lambda: [torch.randn(shape, device="cuda", requires_grad=grad) for shape in shapes]

    def test_inference(self):
        self.check(step, self.tensors((64, 64), (64, 64)))

    def test_training(self):
        self.check(step, self.tensors((64, 64), (64, 64), grad=True), regions=2, backward=True)

    def test_mutated_input(self):
        self.check(lambda cache, x: cache.add_(x).sin(), self.tensors(64, 64))

    def test_partitions(self):
        self.check(lambda x: x.cos() + x.sin().nonzero().sum(), self.tensors((64, 64)), regions=2)

    def test_seeds_of_attention(self):
        """Only the overlay can give its training a graph; without one, nothing is wrong with it."""
        q = torch.randn(2, 2, 64, 64, device="cuda", requires_grad=True)

        def fn(q):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

        compiled = torch.compile(fn, mode="reduce-overhead")
        for _ in range(4):
            compiled(q).sum().backward()
            self.assertTrue(q.grad.isfinite().all())
        self.assertEqual({r.code for r in causes.refused()}, {"policy-alone"} if ALONE else set())


@form.overlay_only
@unittest.skipIf(ALONE, "is itself in a process without seams")
@instantiate_parametrized_tests
class TestAlone(TestCase):
    SOME = "TestNeeds or same or no_hook or inference or training or mutated or bisector"

    @parametrize("which", form.sampled([SOME, "not TestAlone"], 2))
    def test_without_a_seam(self, which):
        arguments = [f"--rootdir={form.ROOT}", "-q", "--tb=short", "-p", "no:cacheprovider", __file__, "-k", which]
        code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
        done = form.fork_python(code, *arguments, env={"TORCH_OVERLAY_DISABLE": "1"})
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])
        self.assertRegex(done.stdout, r"\d\d passed")
        self.assertIn("skipped: needs a seam", done.stdout, "there were seams")
