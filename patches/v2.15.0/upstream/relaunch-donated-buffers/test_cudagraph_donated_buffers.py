# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
import torch._functorch.config
from functorch.compile import aot_function, make_boxed_func
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import config as inductor_config
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch.testing._internal.common_utils import run_tests, TestCase


class OtherPolicy(CUDAGraphPolicy):
    pass


class TestDonatedBuffers(TestCase):
    def donated(self, policy, *, cudagraphs=True):
        """How many saved values the backward of a program may write over."""
        found = []
        collect = graph_compile.collect_bw_donated_buffer_idxs

        def collected(*args):
            found.append(collect(*args))
            return found[-1]

        def compiler(gm, _):
            return make_boxed_func(gm.forward)

        def f(x):
            return x.exp().sin()

        x, expected = (torch.ones(4, requires_grad=True) for _ in range(2))
        options = {"cudagraph_policy": policy, "triton.cudagraphs": cudagraphs}
        with (
            torch._functorch.config.patch(donated_buffer=True),
            inductor_config.patch(options),
            mock.patch.object(
                graph_compile, "collect_bw_donated_buffer_idxs", collected
            ),
        ):
            aot_function(f, fw_compiler=compiler)(x).sum().backward()
        f(expected).sum().backward()
        self.assertEqual(x.grad, expected.grad)
        (donated,) = found
        return len(donated)

    def test_relaunched_forward(self):
        self.assertEqual(self.donated(RelaunchPolicy()), 0)

    def test_forward_that_asks_for_no_graph(self):
        self.assertGreater(self.donated(RelaunchPolicy(), cudagraphs=False), 0)

    def test_other_graphs(self):
        for policy in (None, OtherPolicy()):
            self.assertGreater(self.donated(policy), 0)


if __name__ == "__main__":
    run_tests()
