# Owner(s): ["module: inductor"]

import torch
from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails
from torch._inductor.test_case import run_tests, TestCase


class TestStreamInCacheKey(TestCase):
    def key(self, *streams):
        gm = torch.fx.symbolic_trace(lambda x: x.sin().cos())
        nodes = gm.graph.find_nodes(op="call_method")
        for node, stream in zip(nodes, streams):
            if stream is not None:
                node.meta["custom"] = {"stream": stream}
        details = FxGraphHashDetails(gm, [], {}, [])
        return FxGraphCachePickler(gm).get_hash(details)

    def test_stream_of_a_node_is_in_the_key(self):
        keys = [self.key(), self.key(1), self.key(2), self.key(None, 1)]
        self.assertEqual(len(set(keys)), 4)

    def test_same_streams_have_the_same_key(self):
        self.assertEqual(self.key(1, 2), self.key(1, 2))


if __name__ == "__main__":
    run_tests()
