"""`_functorch.offload.rewrite`: gradients stay the same, and the graphs hold what is needed."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.testing._internal.common_utils import TestCase
from torch.utils.checkpoint import CheckpointPolicy

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._functorch.offload import candidates, pinned_memory, runtime
from torch_overlay._functorch.offload.candidates import Pair
from torch_overlay._functorch.offload.checkpoint_policies import MUST, OFFLOAD
from torch_overlay._functorch.offload.cost_model import Link
from torch_overlay._functorch.offload.device_rates import Rates
from torch_overlay._functorch.offload.ops import BUDGET, IN_USE, LOAD, OWNER, SLAB, STORE, VALUE
from torch_overlay._functorch.offload.rewrite import rewrite
from torch_overlay._functorch.streams.facts import Fact, fact_of
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import copy_in_stream, copy_out_stream
from torch_overlay._functorch.streams.tokens import CALLER


aten = torch.ops.aten
RATES = Rates(Link(1.0, 1.0), 1e3, 1e9, False)
BUDGET_BYTES = 12345


@config.patch(streams=False)  # nothing else changes the graphs
class RewriteCase(TestCase):
    def setUp(self):
        super().setUp()
        for patch in (
            mock.patch.object(candidates, "DEVICE_TYPE", "cpu"),
            mock.patch.object(pinned_memory, "pin", lambda *args: 0),
            mock.patch.object(runtime, "_current_stream", lambda device: "s"),
            mock.patch.object(runtime, "_is_capturing", lambda: False),
            mock.patch.multiple(runtime, _free=[], _all={}, _kept=[]),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def compile(self, fn, again=(), only=None, change=lambda forward: None):
        """The function with every saved tensor that can leave on the host, except
        those that can be computed again and are named."""

        def partition(joint, inputs, *, num_fwd_outputs, **kwargs):
            graphs = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
            change(graphs[0])
            self.pair = pair = Pair(*graphs, num_fwd_outputs)
            names = [c.name for c in pair.candidates(0, RATES)]
            self.names = only or [name for name in names if name not in again]
            choice = SimpleNamespace(chosen=self.names, recomputed=again)
            self.size = rewrite(pair, choice, BUDGET_BYTES, True)
            self.forward, self.backward = (gm.graph for gm in graphs)
            for node in self.forward.nodes:
                node.meta.pop(OFFLOAD, None)  # it is done
            return graphs

        compiler = lambda gm, inputs: make_boxed_func(gm.forward)  # noqa: E731
        return aot_function(fn, compiler, compiler, partition)

    def gradients(self, fn, inputs):
        for x in inputs:
            x.grad = None
        torch.manual_seed(7)
        results = torch.utils._pytree.tree_leaves(fn(*inputs))
        sum(result.sum() for result in results).backward()
        return [*(r.detach() for r in results), *(x.grad for x in inputs)]

    def check(self, fn, *inputs, **kwargs):
        for x in inputs:
            x.requires_grad_()
        expected = self.gradients(fn, inputs)
        compiled = self.compile(fn, **kwargs)
        for _ in range(2):
            found = self.gradients(compiled, inputs)
            self.assertEqual(found, expected, rtol=0, atol=0)
            self.assertEqual(runtime.live()["in_use"], 0)

    def calls(self, graph, target):
        return graph.find_nodes(op="call_function", target=target)


def chain(x, u, v):
    return torch.tanh(torch.sin(torch.mm(x, u)) @ v).sum()


def attention(x, w):
    q, k, v = (x @ w).chunk(3, -1)
    q, k, v = (t.view(2, -1, 4, 4).transpose(1, 2) for t in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    y = heads.reshape(x.shape)
    return x + torch.sin(y) * F.gelu(y), y


def of_one_value(x):
    """Saves two views of one value."""
    made = torch.mm(x, x)
    return torch.mm(made.t(), torch.mm(made.view(8, 8), torch.sin(x)))


class TestValues(RewriteCase):
    def test_chain(self):
        x = torch.randn(8, 8)
        self.check(chain, x, torch.randn(8, 8), torch.randn(8, 8))
        self.assertGreaterEqual(len(self.names), 3)

    def test_views_are_made_again(self):
        self.check(attention, torch.randn(2, 6, 16), torch.randn(16, 48))
        loaded = self.calls(self.backward, LOAD)
        self.assertEqual(len(loaded), len(self.names))

    def test_result_stays(self):
        def fn(x):
            y = torch.sin(x) @ x
            return y, torch.cos(y) @ torch.exp(x)

        self.check(fn, torch.randn(8, 8))
        self.assertNotIn("mm", self.names)
        self.assertIn("mm", [v.name for v in self.pair.refused])

    def test_random_numbers_and_types(self):
        def fn(x):
            y = F.dropout(torch.sin(x) @ x.t(), 0.5)
            z = (y > 0) * torch.exp(y.to(torch.float64) / 100).to(torch.float32)
            return (z @ torch.cos(y)).sum()

        self.check(fn, torch.randn(8, 8))
        types = {node.args[4] for node in self.calls(self.backward, LOAD)}
        self.assertIn(torch.bool, types)

    def test_computed_again(self):
        x = torch.randn(8, 8)
        self.check(chain, x, torch.randn(8, 8), torch.randn(8, 8), again=["sin"])
        self.assertEqual(len(self.calls(self.backward, aten.sin.default)), 1)
        stored = [node.args[1].name for node in self.calls(self.forward, STORE)]
        self.assertEqual(stored, ["mm", "tanh"])

    def test_computed_again_from_a_value_that_stays(self):
        args = [torch.randn(8, 8) for _ in range(3)]
        self.check(chain, *args, again=["sin"], only=["tanh"])
        inputs = [n.name for n in self.backward.find_nodes(op="placeholder")]
        self.assertIn("mm", inputs)
        self.assertNotIn("sin", inputs)

    def test_two_forwards_that_are_alive(self):
        args = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
        expected = self.gradients(chain, args)[1:]
        compiled = self.compile(chain)
        losses = [compiled(*args) for _ in range(2)]
        self.assertEqual(runtime.live()["in_use"], 2)
        for loss in losses:
            for x in args:
                x.grad = None
            loss.backward()
            self.assertEqual([x.grad for x in args], expected, rtol=0, atol=0)


class TestGraphs(RewriteCase):
    def rewritten(self, fn=chain, args=3, **kwargs):
        given = [torch.randn(8, 8, requires_grad=True) for _ in range(args)]
        self.compile(fn, **kwargs)(*given).sum().backward()

    def test_forward(self):
        self.rewritten()
        first = next(n for n in self.forward.nodes if n.op == "call_function")
        (slab,) = self.calls(self.forward, SLAB)
        self.assertIs(first, slab)
        stores = self.calls(self.forward, STORE)
        self.assertEqual(slab.args, (self.size, 0, True))
        self.assertEqual(self.size, 512 * len(self.names))
        offsets = [512 * i for i in range(len(self.names))]
        self.assertEqual([n.args[2] for n in stores], offsets)
        for store, name in zip(stores, self.names):
            self.assertIs(store.args[0], slab)
            self.assertEqual(store.args[1].name, name)
            self.assertIs(store.prev, store.args[1])
            self.assertIsNone(store.meta["val"])
        self.assertEqual(slab.meta["val"].shape, (self.size,))
        outputs = [n.name for n in self.forward.output_node().args[0]]
        self.assertEqual(set(outputs) & {*self.names}, set())
        self.assertEqual(outputs.count(slab.name), 1)

    def test_backward(self):
        self.rewritten()
        inputs = self.backward.find_nodes(op="placeholder")
        saved = [n.name for n in self.forward.output_node().args[0][1:]]
        self.assertEqual([n.name for n in inputs], [*saved, "tangents_1"])
        (use,) = self.calls(self.backward, IN_USE)
        (slab,) = use.args
        self.assertIs(slab, inputs[-2])
        self.assertEqual(use.prev, inputs[-1])
        loads = self.calls(self.backward, LOAD)
        self.assertEqual({n.name for n in loads}, {f"{n}_loaded" for n in self.names})
        for load in loads:
            self.assertIs(load.args[0], slab)
            self.assertIn(load, load.next.all_input_nodes)

    def test_descriptions_of_outputs(self):
        def describe(forward):
            output = forward.graph.output_node()
            output.meta["desc"] = [f"of {value}" for value in output.args[0]]

        self.rewritten(change=describe)
        output = self.forward.output_node()
        found = list(zip(output.args[0], output.meta["desc"], strict=True))
        for value, what in found:
            if value.target is not SLAB:
                self.assertEqual(what, f"of {value}")
        self.assertEqual(found[-1][1], "of mm")

    def test_copies_are_placed(self):
        self.rewritten()
        for target, graph, stream in (
            (STORE, self.forward, copy_out_stream(0)),
            (LOAD, self.backward, copy_in_stream(0)),
        ):
            nodes = self.calls(graph, target)
            self.assertEqual(len(nodes), len(self.names))
            values = set()
            for node in nodes:
                self.assertEqual(node_stream(node), stream)
                fact = Fact(after=(CALLER,), before=(CALLER,))
                self.assertEqual(fact_of(node), fact)
                self.assertEqual(node.meta["custom"][BUDGET], BUDGET_BYTES)
                values.add(node.meta["custom"][VALUE])
            self.assertEqual(values, {*self.names})

    def test_user_streams_hold_in_the_forward_only(self):
        def place(forward):
            for node in forward.graph.nodes:
                if node.target in (aten.t.default, aten.sin.default):
                    node.meta["custom"] = {"stream_note": 1, "other": 2}
                    node.meta |= {
                        "recompute": CheckpointPolicy.MUST_SAVE,
                        OFFLOAD: MUST,
                    }

        self.rewritten(of_one_value, 1, only=["mm"], change=place)
        (load,) = self.calls(self.backward, LOAD)
        view = next(n for n in load.users if n.target is aten.t.default)
        self.assertEqual(view.meta["custom"], {"other": 2})
        self.assertTrue(view.meta.keys().isdisjoint(("recompute", OFFLOAD)))

    def test_inputs_that_are_views_of_one_tensor(self):
        self.rewritten(of_one_value, 1, only=["sin"])
        owners = {
            node.name: node.meta["custom"][OWNER]
            for node in self.backward.find_nodes(op="placeholder")
            if OWNER in node.meta.get("custom", {})
        }
        self.assertEqual(owners, {"t": "mm", "view": "mm"})
