"""`upstream_fixes.aliases`: results have memory of their own, and copies that a program relies on stay."""

import itertools

import torch
from torch._inductor.fx_passes.joint_graph import remove_no_ops
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, TestCase

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import node_stream, place_on
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event


aten = torch.ops.aten
record_stream = torch.ops.streams.record_stream.default
E1 = caller_event(1)


@config.patch(streams=True)
class AliasesTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.mode = FakeTensorMode()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = self.mode.from_tensor(torch.ones(4, 4))

    def call(self, target, *args, stream=0, before=(), **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        if target is not record_stream:
            given = torch.fx.map_arg(args, lambda n: n.meta["val"])
            with self.mode:
                node.meta["val"] = target(*given, **kwargs)
        place_on(node, stream)
        note_fact(node, after=(), promised_to=before)
        return node

    def run_pass(self, name, change, *results):
        """Returns what the graph returns afterwards."""
        self.graph.output(results)
        gm = GraphModule(torch.nn.Module(), self.graph)
        self.graph = gm.graph
        GraphTransformObserver(gm, name).apply_graph_pass(change)
        self.graph.lint()
        return self.graph.output_node().args[0]

    def remove_noop_ops(self, *results):
        return self.run_pass("remove_noop_ops", remove_noop_ops, *results)

    def copies(self):
        return self.graph.find_nodes(op="call_function", target=aten.clone.default)


class TestCopies(AliasesTestCase):
    def test_copy_of_an_input_that_an_asynchronous_copy_fills(self):
        host = self.graph.placeholder("host")
        host.meta["val"] = self.x.meta["val"]
        with self.mode:
            self.x.meta["val"] = torch.empty(4, 4, device="cuda")
        filled = self.call(aten.copy.default, self.x, host, True, stream=1)
        results = self.remove_noop_ops(self.call(aten.clone.default, filled))
        self.assertEqual(self.copies(), list(results))

    def read(self, *, copied=None, stream=0, reader=0, copy_before=(), before=()):
        value = self.x if copied is None else copied
        copy = self.call(aten.clone.default, value, stream=stream, before=copy_before)
        y = self.call(aten.mm.default, copy, copy, stream=reader, before=before)
        self.remove_noop_ops(y)
        return y

    def test_copy_that_another_stream_reads_stays(self):
        y = self.read(stream=1, reader=2, copy_before=(E1,))
        (copy,) = self.copies()
        self.assertEqual(y.args, (copy, copy))
        self.assertEqual(node_stream(copy), 1)
        self.assertEqual(fact_of(copy).promised_to, (E1,))
        self.assertIs(copy.args[0], self.x)

    def test_copy_that_its_own_stream_reads_goes(self):
        self.assertEqual(self.read(stream=1, reader=1).args, (self.x, self.x))

    def test_copy_of_what_the_caller_never_sees_goes(self):
        value = self.call(aten.relu.default, self.x, stream=1)
        self.assertEqual(self.read(copied=value, stream=1, reader=2).args, (value, value))

    @config.patch(streams=False)
    def test_without_the_option(self):
        self.assertEqual(self.read(stream=1, reader=2).args, (self.x, self.x))

    def test_copy_that_is_read_after_the_host_waited(self):
        token = blocking_copy(3)
        y = self.read(stream=1, reader=1, copy_before=(token,))
        self.assertEqual(y.args, (self.copies()[0],) * 2)

    def test_copy_that_is_read_before_the_host_waits(self):
        token = blocking_copy(3)
        y = self.read(stream=1, reader=1, copy_before=(token,), before=(token,))
        self.assertEqual(y.args, (self.x, self.x))

    def test_views_between_are_looked_through(self):
        copy = self.call(aten.clone.default, self.x, stream=1)
        view = self.call(aten.view.default, copy, [16], stream=2)
        y = self.call(aten.sin.default, view, stream=2)
        self.remove_noop_ops(y)
        self.assertEqual(view.args[0], *self.copies())

    def test_first_of_several_copies_stays(self):
        first = self.call(aten.clone.default, self.x, stream=1)
        second = self.call(aten.clone.default, first, stream=2)
        y = self.call(aten.sin.default, second, stream=2)
        self.remove_noop_ops(y)
        (copy,) = self.copies()
        self.assertEqual(node_stream(copy), 1)
        self.assertIs(y.args[0], copy)


class TestResults(AliasesTestCase):
    def result_of_read_value(self, reader):
        value = self.call(aten.relu.default, self.x)
        result = self.call(aten.clone.default, value)
        y = self.call(aten.sin.default, value, stream=reader)
        return value, self.remove_noop_ops(result, y)[0]

    def test_result_of_a_value_that_another_stream_reads(self):
        value, result = self.result_of_read_value(1)
        self.assertEqual([result], self.copies())
        self.assertIs(result.args[0], value)

    def test_result_of_a_value_that_its_own_stream_reads(self):
        side = self.call(aten.cos.default, self.x, stream=1)
        note_fact(side, promised_to=(E1,))
        value, result = self.result_of_read_value(0)
        self.assertIs(result, value)

    def test_block_that_the_caller_gets_is_recorded(self):
        value = self.call(aten.relu.default, self.x)
        result = self.call(aten.clone.default, value)
        record = self.call(record_stream, result, 1)
        y = self.call(aten.sin.default, value, stream=1)
        result, _ = self.remove_noop_ops(result, y)
        self.assertEqual([result], self.copies())
        self.assertIs(record.args[0], result)


class TestAdditionsOfZero(AliasesTestCase):
    def remove_no_ops(self, *results):
        def change(graph):
            zeros = set(graph.find_nodes(op="call_function", target=aten.full.default))
            remove_no_ops(graph.owning_module, zeros, set())

        return self.run_pass("constant_fold_uniform_value", change, *results)

    def plus_zero(self, stream=0):
        zeros = self.call(aten.full.default, [4, 4], 0.0)
        return self.call(aten.add.Tensor, self.x, zeros, stream=stream)

    def test_result_is_a_copy(self):
        (result,) = self.remove_no_ops(self.plus_zero(stream=1))
        self.assertEqual([result], self.copies())
        self.assertEqual(node_stream(result), 1)

    def test_result_made_from_a_result(self):
        first = self.plus_zero(stream=1)
        results = self.remove_no_ops(self.call(aten.add.Tensor, first, first.args[1], stream=2), first)
        self.assertEqual([(n, node_stream(n)) for n in results], [*zip(self.copies(), (1, 2))][::-1])

    def test_value_that_another_stream_reads(self):
        y = self.call(aten.sin.default, self.plus_zero(stream=1), stream=2)
        self.remove_no_ops(y)
        self.assertEqual(y.args, tuple(self.copies()))


def copied_at_each_step(x):
    y = x * torch.ones_like(x)
    z = y + torch.zeros_like(x)
    return z - torch.zeros_like(x), z[1:], y.view(2, 2), z, z.detach()


def views_of_many_kinds(x):
    y, z = torch.zeros_like(x) + x, torch.view_as_complex(x.view(2, 2)) * torch.ones(2)
    parts = (x * torch.ones_like(x)).split(2)
    return x, y.as_strided((2,), (2,), 1), y.view(torch.int32), z.conj(), z.real, x[:0] * 1, parts[0]


def lists(x):
    y = torch._foreach_mul([x, x[:2]], 1)
    torch._foreach_add_([x], 1)
    z = x.clone()
    torch._foreach_mul_([x], 2)
    return *y, z, z[1:]


def parts_written_and_read(x):
    x[1:3] = 7.0
    y, z = x.clone()[1:3], torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
    x.copy_(torch.slice_scatter(z, z[0:1] * 2, 0, 0, 1))
    return y, z, z[1:], x.detach(), x


def written_in_place(x, read=()):
    y = torch.index_put(x, (torch.tensor([1]),), torch.tensor([7.0]))
    read = [x.view(2, 2) @ x.view(2, 2) for _ in read]
    x.copy_(y)
    return y, *read


def written_after_a_read(x):
    return written_in_place(x, read=(x,))


def concatenated(x):
    y = x.view(2, 2) @ x.view(2, 2)
    return torch.cat([y, y.t() @ y, y @ y.t()]), y.view(4)


BUFFERS = {  # of the generated code
    copied_at_each_step: 3,
    views_of_many_kinds: 3,
    lists: 3,
    parts_written_and_read: 3,
    written_in_place: 1,
    written_after_a_read: 2,
    concatenated: 2,
}


def sharing(*tensors):
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    return [a == b != 0 for a, b in itertools.combinations(storages, 2)]


@instantiate_parametrized_tests
class TestSharing(TestCase):
    @parametrize("function", [*BUFFERS])
    def test_as_in_eager(self, function):
        expected = function(given := torch.arange(4.0))
        made, (text,) = run_and_get_code(torch.compile(function, fullgraph=True), same := torch.arange(4.0))
        self.assertEqual((same, *made), (given, *expected))
        self.assertEqual(sharing(same, *made), sharing(given, *expected))
        self.assertEqual(text.count(" = empty_strided_cpu("), BUFFERS[function])
