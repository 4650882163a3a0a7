"""What Dynamo's option `canonicalize_output_graph_node_order` must leave in its place."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.test_case
import torch.nn.functional as F
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401


DRAW: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.25),
    "dropout_of_channels": lambda x: F.dropout2d(x, 0.25),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.25, training=True),
    "attention_with_dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.25),
    "method": lambda x: x.sigmoid().bernoulli(),
    "function": lambda x: torch.rand_like(x) + x,
    "normal": lambda x: torch.normal(x, 1.0),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "fractional_pool": lambda x: F.fractional_max_pool2d(x, 2, output_size=4),
}


@instantiate_parametrized_tests
class TestCanonicalOrder(torch._dynamo.test_case.TestCase):
    """Of two calls of a function, the option puts the one first whose argument comes first."""

    def order(self, function: Callable[[Any], Any]) -> list[str]:
        """The first argument of each call of the graph, whose results are compared with those of eager."""
        graphs: list[list[str]] = []

        def backend(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
            calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
            graphs.append([node.args[0].name for node in calls])
            return gm.forward

        def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first, second = x + 1, x * 2
            return function(second), function(first)

        x = torch.rand(4, 8, 9, 9)
        results = []
        with torch._dynamo.config.patch(canonicalize_output_graph_node_order=True):
            for run in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
                torch.manual_seed(1)
                results.append(run(x))
        expected, found = results
        self.assertEqual(found, expected, atol=0, rtol=0)
        (read,) = graphs
        return read

    @parametrize("name", list(DRAW))
    def test_random_numbers_are_those_of_eager(self, name: str) -> None:
        self.order(DRAW[name])

    def test_what_draws_nothing_is_sorted(self) -> None:
        read = self.order(torch.sigmoid)
        self.assertLess(read.index("add"), read.index("mul"))
