# Owner(s): ["module: inductor"]

import torch
from torch._inductor import config, cudagraph_utils
from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch.testing._internal.common_utils import run_tests, TestCase


class OnTheCallersStream(CUDAGraphPolicy):
    results_are_callers = True


POLICIES = None, CUDAGraphPolicy(), OnTheCallersStream()


class TestResultsOfGraphs(TestCase):
    def test_questions(self):
        answers = []
        for policy in POLICIES:
            with config.patch(cudagraph_policy=policy):
                pool = cudagraph_utils.results_are_in_pool()
                answers.append((pool, cudagraph_utils.results_are_callers()))
        wanted = [(True, False), (False, False), (False, True)]
        self.assertEqual(answers, wanted)

    def keys(self, streams):
        gm = torch.fx.symbolic_trace(lambda x: x.sin())
        found = []
        for policy in POLICIES:
            with config.patch({"cudagraph_policy": policy, "triton.streams": streams}):
                details = FxGraphHashDetails(gm, [], {}, [])
                found.append(FxGraphCachePickler(gm).get_hash(details))
        return found

    def test_key_of_code_that_asks(self):
        keys = self.keys(streams=True)
        self.assertEqual(len(set(keys)), 3)
        self.assertEqual(keys, self.keys(streams=True))

    def test_key_of_other_code(self):
        self.assertEqual(len(set(self.keys(streams=False))), 1)


if __name__ == "__main__":
    run_tests()
