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


@simulated_gpu()
def compiled(fn):
    return compile_only(fn, torch.randn(64, 64, device="cuda"))


class TestStreamFolding(TestCase):
    def test_small_pointwise_branch_is_fused_with_its_consumer(self):
        with simulated_gpu():
            result = compiled(fork_join(torch.cuda.Stream(), torch.sin, torch.add))
        (plan,) = result.plans
        self.assertEqual(({op.stream for op in plan.ops}, result.wrappers[0].count(".run(")), ({0}, 1))
        # Folding decides where kernels run. The graph that the user sees keeps what the user wrote.
        self.assertEqual(result.graph_breaks, [])
        self.assertIn("stream 1", result.graphs[0])

    def test_stream_that_the_function_makes_leaves_nothing(self):
        (plan,) = compiled(lambda x: fork_join(torch.cuda.Stream(), torch.sin, torch.add)(x)).plans
        self.assertEqual((plan.events, {op.stream for op in plan.ops}), ((), {0}))
