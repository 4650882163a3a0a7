"""Branches too small for a stream of their own run on the caller's stream; others stay where the user put them."""

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from torch_overlay.testing import compile_only, simulated_gpu


def fork_join(stream, branch, tail):
    """fn(x): `branch` on the stream between a fork and a join, `tail` of its result on the current stream."""

    def fn(x):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            side = branch(x)
        current.wait_stream(stream)
        return tail(side, x)

    return fn


class TestStreamFolding(TestCase):
    def streams_of(self, build, *shape, mode=None):
        """Planner streams of the launches, and the number of Triton kernels."""
        torch._dynamo.reset()
        with simulated_gpu():
            result = compile_only(build(torch.cuda.Stream()), torch.randn(*shape, device="cuda"), mode=mode)
        (plan,) = result.plans
        return {op.stream for op in plan.ops}, result.wrappers[0].count(".run(")

    def test_small_pointwise_branch_is_fused_with_its_consumer(self):
        streams, kernels = self.streams_of(lambda s: fork_join(s, torch.sin, torch.add), 64, 64)
        self.assertEqual((streams, kernels), ({0}, 1))

    def test_what_the_outside_knows_of_the_stream_stays_true(self):
        """The folded work comes after what the stream held before, and the stream is ordered after it at the exit."""
        torch._dynamo.reset()
        with simulated_gpu():
            fn = fork_join(torch.cuda.Stream(), torch.sin, torch.add)
            (plan,) = compile_only(fn, torch.randn(64, 64, device="cuda")).plans
        orders = {(e.after, e.stream, at, stream) for e in plan.events for at, stream in e.waits}
        self.assertEqual(orders, {(-1, 1, 0, 0), (0, 0, len(plan.ops), 1)})

    def test_stream_that_the_function_makes_leaves_nothing(self):
        def fn(x):
            return fork_join(torch.cuda.Stream(), torch.sin, torch.add)(x)

        torch._dynamo.reset()
        with simulated_gpu():
            (plan,) = compile_only(fn, torch.randn(64, 64, device="cuda")).plans
        self.assertEqual((plan.events, {op.stream for op in plan.ops}), ((), {0}))

    def test_graph_breaks_and_placement_stay_as_written(self):
        """Folding decides where kernels run. The graph that the user sees keeps what the user wrote."""
        torch._dynamo.reset()
        with simulated_gpu():
            fn = fork_join(torch.cuda.Stream(), torch.sin, torch.add)
            result = compile_only(fn, torch.randn(64, 64, device="cuda"))
        self.assertEqual(result.graph_breaks, [])
        self.assertIn("stream 1", result.graphs[0])
