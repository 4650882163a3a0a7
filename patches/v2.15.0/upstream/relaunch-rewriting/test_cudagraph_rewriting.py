# Owner(s): ["module: inductor"]

from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import graph_compile
from torch._inductor.cudagraph_relaunch import coverage, residents
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.cudagraph_relaunch.rewrites import Resident, Rewrite, Rewrites
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import run_tests, TestCase


MADE = Rewrite("resident", "/model.py:3")


class Other(CUDAGraphPolicy):
    def should_wrap(self, compiled_graph):
        return False


def fn(x, table):
    return x @ x + table


class TestRewriting(TestCase):
    """The host stands for the device: the second input of each graph is to be kept
    there, and a copy of it can be told from the input."""

    def setUp(self):
        super().setUp()
        from torch._inductor.cudagraph_relaunch import rewriting

        self.rewritten, self.copied = [], []
        self.found = Rewrites((MADE,), (Resident(1, 0, ()),))
        for owner, name, value in (
            (rewriting, "rewrite", self.rewrite),
            (residents, "index_now", lambda device: device),
            (residents.Residents, "on_device", self.on_device),
        ):
            self.enterContext(mock.patch.object(owner, name, value))
        options = {
            "triton.cudagraphs": True,
            "graph_partition": True,
            "fx_graph_cache": True,
            "fx_graph_remote_cache": False,
            "cudagraph_policy": RelaunchPolicy(),
        }
        self.enterContext(inductor_config.patch(options))
        self.enterContext(torch._functorch.config.patch(enable_autograd_cache=False))
        self.enterContext(fresh_cache())
        counters.clear()

    def rewrite(self, gm, example_inputs, donated):
        self.rewritten.append(donated)
        return self.found, list(example_inputs)

    def on_device(self, position, device, tensor):
        self.copied.append((position, device))
        return tensor + 1

    def call(self, **options):
        """What code that is compiled anew, or comes from the cache, adds to the
        table."""
        torch._dynamo.reset()
        x, table = torch.randn(4, 4), torch.randn(4)
        with inductor_config.patch(options):
            return torch.compile(fn)(x, table) - fn(x, table)

    def hits(self):
        return counters["inductor"]["fxgraph_cache_hit"]

    def test_code_takes_copies(self):
        made = coverage.CompiledCode
        with mock.patch.object(coverage, "CompiledCode", wraps=made) as record:
            self.assertEqual(self.call(), torch.ones(4, 4))
        self.assertEqual(self.copied, [(1, 0)])
        *_, noted, kept = record.call_args.args
        self.assertEqual((noted, kept.rows), self.found)

    def test_code_from_a_cache(self):
        self.call()
        self.assertEqual(self.call(), torch.ones(4, 4))
        self.assertEqual(self.hits(), 1)
        self.assertEqual(self.copied, [(1, 0)] * 2)

    def test_key(self):
        """The same text, of a graph that takes its inputs as they are."""
        self.call()
        self.found = Rewrites()
        self.assertEqual(self.call(), torch.zeros(4, 4))
        self.assertEqual(self.hits(), 0)

    def test_code_that_is_not_rewritten(self):
        for options in (
            {"triton.cudagraph_rewrites": False},
            {"triton.cudagraphs": False},
            {"graph_partition": False},
            {"cudagraph_policy": Other()},
            {"cudagraph_policy": None},
        ):
            self.assertEqual(self.call(**options), torch.zeros(4, 4))
        self.assertEqual((self.rewritten, self.copied), ([], []))

    def test_donated_inputs_of_a_backward(self):
        collect = graph_compile.collect_bw_donated_buffer_idxs

        def donated(*args):
            # As of code without a graph, whether or not relaunched code donates.
            with inductor_config.patch({"triton.cudagraphs": False}):
                return collect(*args)

        self.found = Rewrites()
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        with mock.patch.object(
            graph_compile, "collect_bw_donated_buffer_idxs", donated
        ):
            torch.compile(lambda x, w: ((x @ w).sin() @ w).sin().sum())(x, w).backward()
        forward, backward = self.rewritten
        self.assertEqual(forward, ())
        self.assertTrue(backward)


if __name__ == "__main__":
    run_tests()
