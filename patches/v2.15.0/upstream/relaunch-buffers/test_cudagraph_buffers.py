# Owner(s): ["module: inductor"]

from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_relaunch import policy
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import run_tests, TestCase


class TestBuffers(TestCase):
    def reused(self, is_set, own=True):
        """How many buffers the code of a chain of products uses again."""
        torch._dynamo.reset()

        def fn(x, w):
            for _ in range(4):
                x = x @ w
            return x

        x, w = torch.randn(4, 4), torch.randn(4, 4)
        options = {
            "cudagraph_policy": RelaunchPolicy() if is_set else None,
            "fx_graph_cache": False,
        }
        with (
            inductor_config.patch(options),
            torch._functorch.config.patch(enable_autograd_cache=False),
            mock.patch.object(policy, "own_buffers", lambda graph: own),
            torch.no_grad(),
        ):
            result, (code,) = run_and_get_code(torch.compile(fn, dynamic=False), x, w)
        self.assertEqual(result, fn(x, w))
        return code.count("# reuse")

    def test_buffers(self):
        before = self.reused(False)
        self.assertGreater(before, 0)
        self.assertEqual(self.reused(True), 0)
        self.assertEqual(self.reused(True, own=False), before)


if __name__ == "__main__":
    run_tests()
