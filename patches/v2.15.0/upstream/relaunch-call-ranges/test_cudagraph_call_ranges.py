# Owner(s): ["module: inductor"]

from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor import profiler_ranges
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import run_tests, TestCase


class TestCallRanges(TestCase):
    def setUp(self):
        super().setUp()
        self.said = []
        push = mock.patch.object(profiler_ranges, "push", self.said.append)
        self.enterContext(push)
        self.enterContext(torch._functorch.config.patch(enable_autograd_cache=False))
        self.enterContext(fresh_cache())
        counters.clear()

    def step(self, nvtx=True):
        torch._dynamo.reset()
        x = torch.ones(4, requires_grad=True)
        with inductor_config.patch({"triton.nvtx": nvtx, "fx_graph_cache": True}):
            torch.compile(lambda x: x.sin().cos())(x).sum().backward()
        said, self.said[:] = list(self.said), []
        return said

    def test_forward_and_backward(self):
        for hits in (0, 2):  # of the cache
            forward, backward = self.step()
            self.assertRegex(forward, r"^forward of compiled frame \d+/\d+$")
            self.assertRegex(backward, r"^backward of compiled frame \d+/\d+$")
            self.assertEqual(counters["inductor"]["fxgraph_cache_hit"], hits)

    def test_without_the_option(self):
        self.assertEqual(self.step(nvtx=False), [])


if __name__ == "__main__":
    run_tests()
