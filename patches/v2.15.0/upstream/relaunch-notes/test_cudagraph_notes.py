# Owner(s): ["module: inductor"]

from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import cudagraph_utils, scheduler
from torch._inductor.cudagraph_relaunch import notes
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch.testing._internal.common_utils import run_tests, TestCase


class Policy(RelaunchPolicy):
    """Keeps what it is asked about, and lets it run as compiled."""

    def __init__(self):
        self.seen = []

    def should_wrap(self, compiled_graph):
        self.seen.append(compiled_graph)
        compiled_graph.device_idxs = {0}
        return super().should_wrap(compiled_graph)

    def cudagraphify(self, model, example_inputs, static_input_idxs, **kwargs):
        return model


class TestNotes(TestCase):
    """Code for the host, whose operators are called as they are, is taken for code of
    a device."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        library = self.enterContext(torch.library._scoped_library("noted", "FRAGMENT"))
        tags = (torch.Tag.cudagraph_unsafe,)
        library.define("wait(Tensor x) -> Tensor", tags=tags)
        library.impl("wait", lambda x: x * 2, "CompositeExplicitAutograd")
        library._register_fake("wait", torch.empty_like)
        for owner, name, value in (
            (scheduler.BaseSchedulerNode, "is_gpu", lambda node: True),
            (
                cudagraph_utils,
                "check_multiple_devices_or_any_cpu_nodes",
                lambda _: None,
            ),
        ):
            self.enterContext(mock.patch.object(owner, name, value))
        options = {
            "fallback_by_default": True,
            "triton.cudagraphs": True,
            "graph_partition": True,
            "fx_graph_cache": False,
        }
        self.enterContext(inductor_config.patch(options))
        self.enterContext(torch._functorch.config.patch(enable_autograd_cache=False))
        self.policy = Policy()

    def compiled(self, fn, *args, policy=None, dynamic=False):
        policy = self.policy if policy is None else policy
        with inductor_config.patch(cudagraph_policy=policy):
            torch.compile(fn, dynamic=dynamic)(*args)
        return policy.seen

    def test_what_is_split_off(self):
        def fn(x):
            return torch.ops.noted.wait(x.sin()).cos()

        (code,) = self.compiled(fn, torch.ones(4))
        noted = notes.partitions_of(code)
        self.assertEqual([kernels for kernels, *_ in noted.graphs], [1, 1])
        (row,) = noted.split_off
        self.assertEqual(
            (row.code, row.operator), ("split-unsafe", "noted::wait.default")
        )
        self.assertIn("test_cudagraph_notes.py", row.line)

    def test_outputs_that_are_saved(self):
        w = torch.ones(4, 4, requires_grad=True)
        code, *_ = self.compiled(lambda x, w: (x @ w).sin(), torch.ones(4, 4), w)
        self.assertEqual(notes.first_saved(code), 1)

    def test_numbers_that_no_size_depends_on(self):
        (code,) = self.compiled(lambda x, n: x * n, torch.ones(5, 3), 7, dynamic=True)
        self.assertEqual(len(notes.numbers_of(code, None)), 1)
        (from_the_end,) = notes.numbers_of(code, 0)
        self.assertLess(from_the_end, 0)
        (code,) = self.compiled(lambda x, n: x[:n], torch.ones(5), 3, dynamic=True)[1:]
        self.assertEqual(notes.numbers_of(code, None), ())

    def test_other_policies(self):
        class Other(cudagraph_utils.CUDAGraphPolicy):
            seen = []

            def should_wrap(self, compiled_graph):
                self.seen.append(compiled_graph)
                return False

        (code,) = self.compiled(torch.sin, torch.ones(4), policy=Other())
        self.assertFalse(notes.are_there(code))


if __name__ == "__main__":
    run_tests()
