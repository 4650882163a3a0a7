# Owner(s): ["module: fx"]

import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.25),
    "dropout2d": lambda x: F.dropout2d(x, 0.25),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.25, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.25),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=4),
}
NOT_RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.25, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "sigmoid": torch.sigmoid,
}


@instantiate_parametrized_tests
class TestCanonicalizeRandom(TestCase):
    """Of two calls of a function, the one whose argument comes first is sorted first."""

    def run_both(self, function):
        """Compare with eager, and return the first argument of each call of the graph."""
        graphs = []

        def backend(gm, _):
            graphs.append(
                [n.args[0].name for n in gm.graph.nodes if n.op.startswith("call_")]
            )
            return gm.forward

        def fn(x):
            a, b = x + 1, x * 2
            return function(b), function(a)

        x = torch.rand(4, 8, 9, 9)
        results = []
        with torch._dynamo.config.patch(canonicalize_output_graph_node_order=True):
            for run in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
                torch.manual_seed(1)
                results.append(run(x))
        self.assertEqual(results[1], results[0], atol=0, rtol=0)
        self.assertEqual(len(graphs), 1)
        return graphs[0]

    @parametrize("name", list(RANDOM))
    def test_random_numbers_are_those_of_eager(self, name):
        self.run_both(RANDOM[name])

    @parametrize("name", list(NOT_RANDOM))
    def test_what_is_not_random_is_sorted(self, name):
        arguments = self.run_both(NOT_RANDOM[name])
        self.assertLess(arguments.index("add"), arguments.index("mul"))


if __name__ == "__main__":
    run_tests()
