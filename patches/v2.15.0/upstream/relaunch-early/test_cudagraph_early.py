# Owner(s): ["module: inductor"]

from unittest import mock

import torch._inductor.config as inductor_config
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cudagraph_relaunch import prepare
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch.testing._internal.common_utils import run_tests, TestCase


class TestEarly(TestCase):
    def wait(self, policy, graphs):
        """What happens in which order."""
        done = []
        compiler = AsyncCompile()
        options = {"cudagraph_policy": policy, "triton.cudagraphs": graphs}
        with (
            inductor_config.patch(options),
            mock.patch.object(async_compile, "get_compile_threads", lambda: 2),
            mock.patch.object(
                compiler, "_wait_futures", lambda scope: done.append("waited")
            ),
            mock.patch.object(prepare, "prepare_early", lambda: done.append("early")),
        ):
            compiler.wait({})
        return done

    def test_code_that_gets_relaunched_graphs(self):
        self.assertEqual(self.wait(RelaunchPolicy(), True), ["early", "waited"])

    def test_other_code(self):
        self.assertEqual(self.wait(RelaunchPolicy(), False), ["waited"])
        self.assertEqual(self.wait(None, True), ["waited"])


if __name__ == "__main__":
    run_tests()
