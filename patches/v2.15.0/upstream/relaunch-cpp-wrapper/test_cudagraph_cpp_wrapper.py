# Owner(s): ["module: inductor"]

from unittest import mock

import torch._inductor.config as inductor_config
from torch._inductor.compile_fx import get_cpp_wrapper_config
from torch._inductor.cudagraph_relaunch import refusals
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests, TestCase


class TestCppWrapper(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(refusals, "_refused", []))

    def asked(self, policy=None, cut=True, graphs=True, log=True):
        """Whether graphs stay on, and the reasons of refusals."""
        options = {
            "cudagraph_policy": policy,
            "graph_partition": cut,
            "triton.cudagraphs": graphs,
        }
        with inductor_config.patch(options):
            found = get_cpp_wrapper_config(log)["triton.cudagraphs"]
        return found, [refused.reason for refused in refusals.refused()]

    def test_policy_is_told(self):
        self.assertEqual(self.asked(RelaunchPolicy()), (False, ["cpp-wrapper"]))
        self.assertEqual(self.asked(RelaunchPolicy()), (False, ["cpp-wrapper"]))

    def test_who_is_not_told(self):
        self.assertEqual(self.asked(), (False, []))
        self.assertEqual(self.asked(RelaunchPolicy(), graphs=False), (False, []))
        self.assertEqual(self.asked(RelaunchPolicy(), cut=False), (True, []))
        self.assertEqual(self.asked(RelaunchPolicy(), log=False), (False, []))
        with V.set_aot_compilation(True):
            self.assertEqual(self.asked(RelaunchPolicy()), (False, []))


if __name__ == "__main__":
    run_tests()
