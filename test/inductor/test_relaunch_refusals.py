"""Code that asked for a CUDA graph gets one, or a reason that is counted, logged and listed: never neither.

Which of them is decided where: by Inductor before there is compiled code, by Inductor with it, when code is split, and
by us at the first calls. Collectives are the case that needs most of it; they are split off.
"""

import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._dynamo.utils import counters

import form  # noqa: F401
from stand_ins.relaunch_case import CompilingTestCase, region, RelaunchTestCase
from torch_overlay import config
from torch_overlay._inductor.relaunch import causes, policy
from torch_overlay._inductor.relaunch.capture.device import check_libraries
from torch_overlay._inductor.relaunch.notes import CompiledNotes, Partitions, SplitOff
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode, Unprovable
from torch_overlay.testing import compile_only, simulated_gpu


class TestOfInductor(CompilingTestCase):
    def test_reason_is_told_for_forward_and_backward(self):
        made = self.compiled(torch.sin, backward=True, force_disable_cudagraph_TESTING_ONLY=True)
        self.assertEqual(made, [])
        self.assertEqual(self.refused(), [("inductor", "forward"), ("inductor", "backward")])
        self.assertIn("[inductor]: force_disable_cudagraph_TESTING_ONLY", causes.refusals()[0])

    def test_backward_does_without_its_forward(self):
        """Trees must have both or neither."""
        for mode, graphs in (("relaunch", 1), ("trees", 0)):
            self.forget_refusals()
            with simulated_gpu() as gpu, config.patch(cudagraphs=mode):
                x = torch.randn(4, device="cuda", requires_grad=True)
                before = len(gpu.cudagraphs)
                with inductor_config.patch(force_disable_cudagraph_TESTING_ONLY=True):
                    y = torch.compile(torch.sin, mode="reduce-overhead")(x)
                y.sum().backward()
                self.assertEqual(len(gpu.cudagraphs) - before, graphs)
            self.assertEqual(self.refused(), [("inductor", "forward")] if graphs else [])

    def test_handle_of_a_stream_is_read(self):
        """Also without side streams, and in a backward that is compiled when the frame has been traced."""

        def fn(x):
            return x.sin() * (torch.cuda.current_stream().cuda_stream + 1)

        self.assertEqual(self.compiled(fn, backward=True), [])
        self.assertEqual(self.refused(), [("inductor", "forward"), ("inductor", "backward")])
        self.assertIn("the raw handle of a stream is read", causes.refusals()[0])

    @pytest.mark.each_hook
    def test_cpp_wrapper(self):
        self.assertEqual(self.compiled(torch.sin, cpp_wrapper=True), [])
        self.assertEqual([r.code for r in causes.refused()], ["cpp-wrapper"])

    def test_all_is_split_off_for_no_known_reason(self):
        """Note [Nobody is left without a graph or a reason]. Operations on streams alone are nothing to launch."""
        rows = (("split-streams", False), ("split-collective", True))
        streams, other = (SplitOff.of(code, "why", kernels=launches) for code, launches in rows)
        cases = {(): "split", (other,): "split", (streams,): None, (streams, other): "split"}
        for reasons, expected in cases.items():
            compiled = SimpleNamespace(
                kernel_free_cudagraph=False,
                device_types={"cuda"},
                disabled_cudagraphs_reason=None,
                cudagraph_info=None,
                partition_maps=[],
            )
            CompiledNotes(partitions=Partitions((), reasons)).put(compiled)
            found = policy.why_not(compiled)
            self.assertEqual(found and found[0], expected)
            if not reasons:
                self.assertIn("all of it is split off: Inductor does not say why", found[1])

    def test_part_of_it_is_split_off(self):
        made = self.compiled(lambda x: x.sin().nonzero())
        self.assertEqual((len(made), self.refused()), (1, []))

    def test_zeros_without_memory_are_split_off(self):
        """A gradient of `sgn` has no address: a graph can't return it, and a capture can't ask for its memory."""
        made = self.compiled(lambda x, w: (x.sgn(), w @ w), (16, 64), (64, 64), backward=True)
        self.assertEqual((len(made), self.refused()), (2, []))
        self.assertEqual(len(self.compiled(lambda x: (x.sgn(), x.sgn().sum()), backward=True)), 1)
        self.assertEqual(self.refused(), [])
        self.assertIn("_efficientzerotensor", self.seen.wrappers[-1])

    def test_graphs_that_are_not_ours_are_not_told_of(self):
        for mode in ("trees", "off"):
            self.compiled(torch.sin, backward=True, mode=mode, force_disable_cudagraph_TESTING_ONLY=True)
        self.assertEqual(self.refused(), [])

    def test_policy_of_the_user(self):
        """It may wrap the whole elsewhere."""
        outside = SimpleNamespace(should_wrap=lambda graph: False, wrap_output=lambda graph: graph)
        with mock.patch.object(inductor_config, "cudagraph_policy", outside):
            self.assertEqual(self.compiled(torch.sin), [])
        self.assertEqual(self.refused(), [])


class TestOfCalls(RelaunchTestCase):
    def runner(self, line, bound=64):
        with config.patch(cudagraph_templates=bound):
            return super().runner(region("x, n", f"return ({line},)"))

    def test_no_call_is_the_second_one(self):
        """Nothing is wrong: such calls get no graph, and keep no more states than others."""
        run = self.runner("x * n", bound=2)
        for n in range(20):
            x = torch.randn(4)
            self.assertEqual(run([x, n])[0], x * n)
        self.assertEqual(counters["torch_overlay"]["cudagraph_captures"], 0)
        self.assertEqual((causes.refused(), run.outside, len(run.states)), ([], {"warm-up": 20}, 8))

    def test_after_a_reset_the_second_call_is_one_again(self):
        run = self.runner("x * n", bound=2)
        for n in range(20):
            run([torch.randn(4), n])
        run.forget()
        for _ in range(3):
            x = torch.randn(4)
            self.assertEqual(run([x, 100])[0], x * 100)
        self.assertEqual(counters["torch_overlay"]["cudagraph_captures"], 1)
        self.assertEqual(counters["torch_overlay"]["cudagraph_relaunches"], 2)

    def test_each_call_in_a_new_thread(self):
        run, identities = self.runner("x * n", bound=1), iter(range(100))
        with mock.patch.object(threading, "get_ident", lambda: next(identities)):
            for _ in range(6):
                run([torch.randn(4), 2])
        self.assertEqual((causes.refused(), run.outside), ([], {"warm-up": 6}))

    def test_graphs_for_sizes_that_come_again_are_no_refusal(self):
        run = self.runner("x * n", bound=2)
        for n in [1, 1, 2, 2, 3, 3, 1, 1, 1]:
            run([torch.randn(4), n])
        self.assertEqual(causes.refusals(), [])

    def test_collective_that_was_not_split_off(self):
        """As in a backward that is compiled when trees are chosen, of a forward that was not."""
        run = self.runner("x * n if n else torch.ops._c10d_functional.all_reduce(x, 'sum', '0')")
        for _ in range(3):
            run([torch.randn(4), 2])
        self.assertEqual([r.code for r in causes.refused()], ["collective"])
        self.assertIn("it contains collectives (_c10d_functional)", causes.refusals()[0])

    def test_collective_inside_an_operator(self):
        def graph(*names):
            nodes = [KernelNode(i, i, name, 0, 0, 0, (1, 1, 1), (1, 1, 1), 0, ()) for i, name in enumerate(names)]
            return CapturedGraph(tuple(nodes), (), (), 0, 0)

        check_libraries(graph("triton_poi_fused_0", "nvjet_tst"))
        name = "_Z40ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE"
        with self.assertRaisesRegex(Unprovable, "calls NCCL.*custom_should_partition_ops"):
            check_libraries(graph("triton_poi_fused_0", name))


class TestDistributed(CompilingTestCase):
    """In one process: the other rank is made up."""

    def setUp(self):
        super().setUp()
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    @staticmethod
    def reduced(x):
        import torch.distributed._functional_collectives as functional

        y = torch.tanh(x @ x.t())
        return functional.all_reduce(y, "sum", dist.group.WORLD).relu() + y

    def check_partitions(self, region, *operators):
        """These collectives stand between the partitions, and none inside."""
        partitions, _, call = self.seen.calls(region).partition("def call(")
        self.assertNotIn("_c10d_functional", partitions)
        for operator in operators:
            self.assertIn(f"_c10d_functional.{operator}", call)

    def test_collective_is_split_off(self):
        before, after = self.compiled(self.reduced)
        self.assertEqual([c.name.rpartition(", ")[2] for c in (before, after)], ["partition 0", "partition 1"])
        self.assertIn("test_relaunch_refusals.py", after.source)
        self.check_partitions(0, "all_reduce_", "wait_tensor")
        self.assertEqual(self.refused(), [])

    def test_collectives_of_a_backward_are_split_off(self):
        import torch.distributed._functional_collectives as functional

        def fn(x, w):
            return (functional.all_gather_tensor_autograd((x @ w).tanh(), 0, dist.group.WORLD) @ w).sin()

        made = self.compiled(fn, (16, 64), (64, 64), backward=True)
        self.assertEqual([c.is_backward for c in made], [False, False, True, True])
        self.check_partitions(0, "all_gather_into_tensor", "wait_tensor")
        self.check_partitions(1, "reduce_scatter_tensor", "wait_tensor")
        self.assertEqual(self.refused(), [])

    def test_trees_capture_collectives_as_before(self):
        self.assertEqual(self.compiled(self.reduced, mode="trees"), ["tree"])
        self.assertIn("_c10d_functional.all_reduce_", self.seen.calls().partition("def call(")[0])

    def test_collective_that_can_not_be_split_off(self):
        self.assertEqual(self.compiled(self.reduced, graph_partition=False), [])
        self.assertEqual(self.refused(), [("inductor", "inference")])
        self.assertIn("_c10d_functional.all_reduce.default", causes.refusals()[0])

    def test_each_bucket_of_ddp_gets_its_graphs(self):
        """What DDP's own code needs real tensors for is left out: here is what Dynamo makes of its buckets."""

        def fn(x, *weights):
            for w in weights:
                x = torch.relu(x @ w)
            return x

        active = SimpleNamespace(bucket_bytes_cap=1 << 20)
        ddp = torch.nn.parallel.DistributedDataParallel
        with mock.patch.object(ddp, "_get_active_ddp_module", staticmethod(lambda: active)), simulated_gpu():
            weights = [torch.nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(3)]
            with config.patch(cudagraphs="relaunch"):
                made = compile_only(
                    lambda x: fn(x, *weights), torch.randn(8, 512, device="cuda"), mode="reduce-overhead", backward=True
                ).cudagraphs
        kinds = [graph["relaunch"].name.partition(" of")[0] for graph in made]
        self.assertEqual(sorted(kinds), ["backward"] * 3 + ["forward"] * 3)
        self.assertEqual(self.refused(), [])
