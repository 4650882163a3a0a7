"""Facts of a traced graph's nodes: whose memory eager writes, and who reads an input first."""

import torch
import torch._dynamo.config
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream, take_operations
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import fact_of, NOTHING


class TestGraphNotes(TestCase):
    """Streams are numbered as a frame enters them. Number 0 is the caller's, for which
    `current` stands: each program enters it first."""

    def setUp(self):
        super().setUp()
        self.streams = [stream(i) for i in (0, 7, 9)]
        self.enterContext(accelerator(lambda device=None: self.streams[0]))

    def notes(self, function, *args):
        """Compile and call; return for each graph the facts of its nodes, whether its
        frame was resumed and goes on, and the stream of each input's first reader."""
        found = []

        def backend(gm, inputs):
            frame = registry.current()
            facts = {node.name: fact_of(node) for node in gm.graph.nodes}
            readers = {node.name: i for node, i in frame.first_readers.items()}
            found.append((facts, (frame.is_resumed, frame.goes_on), readers))
            take_operations(gm)
            return gm.forward

        with torch._dynamo.config.patch(canonicalize_output_graph_node_order=False):
            torch.compile(function, backend=backend)(*args, *self.streams)
        return found

    def one(self, function, *args):
        (found,) = self.notes(function, *args)
        return found

    def test_stream_of_an_out_tensor(self):
        def f(x, given, current, side, other):
            with current:
                pass
            with side:
                y = torch.empty_like(x)
            with other:
                into_own = torch.add(x, 1, out=y)
                into_given = torch.mul(x, 2, out=given)
                into_view = torch.mul(x, 3, out=y.view(-1))
            return into_own, into_given, into_view

        facts, *_ = self.one(f, torch.ones(3), torch.ones(3))
        targets = {name: fact.eager_storage for name, fact in facts.items() if fact.is_given}
        own, given = (("y", 1),), (("l_given_", None),)
        self.assertEqual(targets, {"into_own": own, "into_view": own, "into_given": given})

    def test_streams_of_two_out_tensors(self):
        def f(x, given, current, side, other):
            with current:
                pass
            with side:
                values = torch.empty(3)
            with other:
                torch.max(x, 1, out=(values, given))
            return values.neg()

        facts, *_ = self.one(f, torch.ones(3, 3), torch.ones(3, dtype=torch.int64))
        (fact,) = [fact for fact in facts.values() if fact.is_given]
        self.assertEqual(fact.eager_storage, (("values", 1), ("l_given_", None)))

    def test_stream_of_an_argument_that_is_returned(self):
        def f(x, current, side, other):
            with current:
                pass
            with side:
                y = x + 1
            with other:
                torch.nn.functional.relu(y, inplace=True)
                torch.ops.aten.mul_.Tensor(x, y)
            return y.neg()

        facts, *_ = self.one(f, torch.ones(3))
        targets = {name: fact.eager_storage for name, fact in facts.items() if fact.is_given}
        self.assertEqual(targets, {"relu": (("y", 1),), "mul__tensor": (("l_x_", None),)})

    def test_storage_that_is_updated(self):
        def f(x, current, side, other):
            with current:
                pass
            with side:
                base = x + 1
                view = base[1:]
            with other:
                base.zero_()
                apart = x * 2
            return view.neg(), apart

        facts, *_ = self.one(f, torch.ones(3))
        storages = {name: fact.eager_storage for name, fact in facts.items() if fact.eager_storage}
        self.assertEqual(storages, dict.fromkeys(("base", "view", "zero_"), (("base", 1),)))

    def test_storage_of_an_input(self):
        def f(x, current, side, other):
            with current:
                pass
            with side:
                x.add_(1)
            return x * 2

        facts, *_ = self.one(f, torch.ones(3))
        self.assertEqual(facts["add_"].eager_storage, (("l_x_", None),))
        self.assertEqual(facts["mul"].eager_storage, ())

    def test_storages_of_a_list(self):
        def f(x, current, side, other):
            with current:
                pass
            with side:
                a = x + 1
            with other:
                b = x + 2
                torch._foreach_mul_([a, b], 2)
            return a, b

        facts, *_ = self.one(f, torch.ones(3))
        (update,) = [fact for name, fact in facts.items() if "foreach" in name]
        self.assertEqual(update.eager_storage, (("a", 1), ("b", 2)))

    def test_bodies(self):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, into, other):
                with other:
                    return torch.mul(x, 2, out=into).neg()

            @staticmethod
            def backward(ctx, gradient):
                return gradient, None, None

        found = []

        def backend(gm, inputs):
            bodies = [m for m in gm.children() if isinstance(m, torch.fx.GraphModule)]
            found.extend(fact_of(n) for body in bodies for n in body.graph.nodes)
            take_operations(gm)
            return gm.forward

        def f(x, current, side, other):
            with current:
                pass
            with side:
                into = torch.empty(3)
            return Scaled.apply(x, into, other)

        torch.compile(f, backend=backend)(torch.ones(3, requires_grad=True), *self.streams)
        (fact,) = [fact for fact in found if fact.is_given]
        self.assertEqual(fact.eager_storage, (("into", 1),))

    def test_first_readers(self):
        def f(x, y, current, side, other):
            with current:
                pass
            with side:
                x.view(-1)  # nobody uses it
            with other:
                z = x + 1
            return z + y

        _, _, readers = self.one(f, torch.ones(3), torch.ones(3))
        self.assertEqual(readers, {"l_x_": 1, "l_y_": 0})

    def test_graph_break(self):
        @torch._dynamo.disable
        def break_graph():
            pass

        def f(x, current, side, other):
            with current:
                x = x + 1
            with side:
                x = x * 2
            break_graph()
            with current:
                x = x - 3
            with side:
                return x / 4

        first, second = self.notes(f, torch.ones(3))
        self.assertEqual(first[1], (False, True))
        self.assertEqual(second[1], (True, False))

    def test_graph_without_streams(self):
        def f(x, *streams):
            y = x + 1
            torch.mul(x, 2, out=y)
            return y.zero_()

        facts, *_ = self.one(f, torch.ones(3))
        self.assertEqual(set(facts.values()), {NOTHING})
