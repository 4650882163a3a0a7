# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch.testing._internal.common_utils import run_tests, TestCase


class TestCacheKey(TestCase):
    def key(self, policy):
        gm = torch.fx.symbolic_trace(lambda x: x.sin())
        with inductor_config.patch(cudagraph_policy=policy):
            details = FxGraphHashDetails(gm, [], {}, [])
            return FxGraphCachePickler(gm).get_hash(details)

    def test_policy_that_relaunches(self):
        self.assertNotEqual(self.key(RelaunchPolicy()), self.key(None))
        self.assertEqual(self.key(RelaunchPolicy()), self.key(RelaunchPolicy()))

    def test_other_policies(self):
        self.assertEqual(self.key(CUDAGraphPolicy()), self.key(None))


if __name__ == "__main__":
    run_tests()
