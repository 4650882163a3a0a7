# Owner(s): ["module: aotdispatch"]

import operator

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo._streams import registry
from torch._dynamo.source import LocalSource
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
)
from torch._functorch._streams.eager_memory import (
    foreign_reads,
    memory_stream,
    record_inputs,
    result_memory,
    results_made,
    returned_storages,
    saved_in_eager,
)
from torch._functorch._streams.facts import ForeignRead, note_fact
from torch._functorch._streams.fx import place_on
from torch.fx import Graph
from torch.testing._internal.common_utils import run_tests, TestCase


aten, higher = torch.ops.aten, torch.ops.higher_order
OTHER = {s: ForeignRead(s, "other") for s in range(3)}
FREED = {s: ForeignRead(s, "freed") for s in range(3)}


class EagerMemoryTestCase(TestCase):
    def setUp(self):
        super().setUp()
        registry.reset()
        self.addCleanup(registry.reset)
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = "the value of x"

    def call(self, target, *args, stream=0, written=None, fact=(), **kwargs):
        """A node of an operation. `written` is what the user called for it."""
        node = self.graph.call_function(target, args, kwargs)
        place_on(node, stream)
        note_fact(node, **dict(fact))
        if written is not None:
            node.meta["source_fn_stack"] = [("call", written)]
        return node

    def make(self, stream=0, storage=None):
        fact = {} if storage is None else {"eager_storage": (storage,)}
        return self.call(aten.mm.default, self.x, self.x, stream=stream, fact=fact)

    def view(self, base, stream=0):
        return self.call(aten.permute.default, base, [1, 0], stream=stream)

    def update(self, base, stream=0, written="add_", storage=None):
        fact = {} if storage is None else {"eager_storage": (storage,)}
        return self.call(
            aten.add.Tensor, base, 1, stream=stream, written=written, fact=fact
        )

    def record(self, value, stream):
        return self.call(torch.ops.streams.record_stream.default, value, stream)

    def output(self, *values, desc=None):
        node = self.graph.output(values)
        node.meta["desc"] = desc or [PlainAOTOutput(i) for i in range(len(values))]
        return node


class TestMemoryStream(EagerMemoryTestCase):
    def test_views_are_their_bases_memory(self):
        made = self.make(1)
        self.assertEqual(memory_stream(made), 1)
        self.assertEqual(memory_stream(self.view(self.view(made, 2), 3)), 1)
        self.assertIsNone(memory_stream(self.view(self.x, 2)))
        parts = self.call(aten.split.Tensor, made, 2, stream=2)
        part = self.call(operator.getitem, parts, 0, stream=2)
        self.assertEqual(memory_stream(part), 1)

    def test_one_of_several_results(self):
        both = self.call(aten.topk.default, self.make(1), 2, stream=2)
        one = self.call(operator.getitem, both, 0, stream=0)
        self.assertEqual(memory_stream(one), 2)

    def test_updates_in_place(self):
        made = self.make()
        for written in ("add_", operator.iadd, torch.relu_):
            self.assertEqual(memory_stream(self.update(made, 1, written)), 0)
            self.assertIsNone(memory_stream(self.update(self.x, 1, written)))
        for written in ("add", "__add__", torch.relu, operator.add):
            self.assertEqual(memory_stream(self.update(made, 1, written)), 1)
        self.assertIsNone(
            memory_stream(self.call(aten.ones.default, [4], stream=1, written="fill_"))
        )

    def test_updates_of_a_part(self):
        made = self.make()
        part = self.call(aten.add.Tensor, made, 1, stream=1)
        put = self.call(aten.select_scatter.default, made, part, 0, 0, stream=1)
        self.assertEqual(memory_stream(put), 0)
        for written in ("slice_scatter", torch.slice_scatter):  # the user's own
            new = self.call(
                aten.slice_scatter.default, made, part, stream=1, written=written
            )
            self.assertEqual(memory_stream(new), 1)

    def test_updates_under_a_mask(self):
        made, mask = self.make(), self.make(1)
        known = {"stream": 1, "written": "masked_fill_"}
        under = self.call(aten.where.self, mask, self.x, made, **known)
        self.assertEqual(memory_stream(under), 0)
        under = self.call(aten.where.self, mask, made, self.x, **known)
        self.assertIsNone(memory_stream(under))
        known["fact"] = {"eager_storage": (("mm", 2),)}  # what is noted is surer
        under = self.call(aten.where.self, mask, self.x, made, **known)
        self.assertEqual(memory_stream(under), 2)

    def test_updates_of_lists(self):
        first, second = self.make(0), self.make(2)
        known = {"stream": 1, "written": "_foreach_add_"}
        listed = [first, second, self.x]
        updated = self.call(aten._foreach_add.Scalar, listed, 1, **known)
        parts = [self.call(operator.getitem, updated, i, **known) for i in range(3)]
        self.assertEqual([memory_stream(part) for part in parts], [0, 2, None])
        self.assertEqual(foreign_reads(updated, {}), (OTHER[0], OTHER[2]))
        known["written"] = "_foreach_add"
        made = self.call(aten._foreach_add.Scalar, listed, 1, **known)
        part = self.call(operator.getitem, made, 0, **known)
        self.assertEqual(memory_stream(part), 1)

    def test_updates_of_several_lists(self):
        other = self.make(2)
        lists = [self.x], [other], [other], [self.x], [other]
        known = {"stream": 1, "written": torch._fused_adam_}
        updated = self.call(aten._fused_adam.default, *lists, [self.x], **known)
        for k, stream in ((0, None), (1, 2), (4, 2)):
            results = self.call(operator.getitem, updated, k, **known)
            part = self.call(operator.getitem, results, 0, **known)
            self.assertEqual(memory_stream(part), stream)

    def test_updates_of_lists_whose_storages_are_known(self):
        """The list that is read first need not be the one that is updated."""
        storages = ("mm", 0), ("mm_1", 2)
        made = [self.make(storage[1], storage) for storage in storages]
        known = {"stream": 1, "written": torch._foreach_lerp_}
        known["fact"] = {"eager_storage": storages}
        updated = self.call(aten._foreach_add.List, [self.x, self.x], made, **known)
        parts = [self.call(operator.getitem, updated, i, **known) for i in range(2)]
        self.assertEqual([memory_stream(part) for part in parts], [0, 2])
        self.assertEqual(foreign_reads(updated, {}), (OTHER[0], OTHER[2]))

    def test_updates_by_operators_and_kernels(self):
        made, read = self.make(0), self.make(2)
        copy_ = aten.copy_.default
        kernel = {"kwargs": {"x": read, "out": made}, "tensors_to_clone": ["out"]}
        v2 = {"src": read, "_all_bases": [made]}
        for target, args, kwargs, index in (
            (higher.triton_kernel_wrapper_functional, (), kernel, "out"),
            (higher.auto_functionalized_v2, (copy_,), v2, 1),
            (higher.auto_functionalized, (copy_,), {"self": made, "src": read}, 1),
        ):
            call = self.graph.call_function(target, args, kwargs)
            place_on(call, 1)
            updated = self.call(operator.getitem, call, index, stream=1)
            self.assertEqual(memory_stream(updated), 0)
            self.assertEqual(foreign_reads(call, {}), (OTHER[0], FREED[2]))
            reader = self.call(aten.relu.default, updated)
            self.assertEqual(foreign_reads(reader, {}), (OTHER[1],))

    def test_given_as_out(self):
        for target, wanted in ((2, 2), (0, 0), (-1, None)):
            fact = {"eager_targets": (target,)}
            made = self.call(aten.mul.Tensor, self.x, 3, stream=1, fact=fact)
            self.assertEqual(memory_stream(made), wanted)
        known = {"stream": 1, "fact": {"eager_targets": (2, -1)}}
        made = self.call(aten.max.dim, self.x, 1, **known)
        results = [self.call(operator.getitem, made, i, **known) for i in range(2)]
        self.assertEqual([memory_stream(r) for r in results], [2, None])


class TestForeignReads(EagerMemoryTestCase):
    def read(self, *values, stream=0, fact=()):
        return self.call(aten.add.Tensor, *values, stream=stream, fact=fact)

    def test_memory_that_eager_frees(self):
        first, second = self.make(1), self.make(2)
        node = self.read(first, second)
        self.assertEqual(foreign_reads(node, {}), (FREED[1], FREED[2]))
        self.assertEqual(
            foreign_reads(self.read(first, second, stream=1), {}), (FREED[2],)
        )
        self.assertEqual(foreign_reads(self.read(self.x, self.x, stream=1), {}), ())
        self.assertEqual(foreign_reads(self.view(first), {}), ())
        self.assertEqual(
            foreign_reads(self.read(self.view(first), first), {}), (FREED[1],)
        )
        parts = self.call(aten.split.Tensor, first, 2, stream=2)
        part = self.call(operator.getitem, parts, 0, stream=2)
        self.assertEqual(foreign_reads(self.read(part, self.x), {}), (FREED[1],))

    def test_memory_that_eager_keeps(self):
        made = self.make(1)
        node = self.read(self.view(made), self.x)
        kept = ForeignRead(1, "kept", made.name)
        self.assertEqual(foreign_reads(node, {}, {made}), (kept,))

    def test_memory_that_eager_does_not_have(self):
        updated = self.update(self.make(0), 1)
        node = self.read(updated, self.x)
        self.assertEqual(foreign_reads(node, {}, {updated}), (OTHER[1],))
        self.assertEqual(foreign_reads(self.update(updated), {}), (OTHER[1],))

    def test_memory_that_lives_on(self):
        made, other = self.make(1), self.make(1)
        update = self.call(aten.add.Tensor, made, other, written="add_")
        self.assertEqual(foreign_reads(update, {}), (FREED[1], OTHER[1]))
        given = self.read(made, self.x, fact={"eager_targets": (1,)})
        self.assertEqual(foreign_reads(given, {}), (OTHER[1],))
        self.assertEqual(foreign_reads(self.read(made, self.x), {}), (FREED[1],))
        registry.current().goes_on = True
        self.assertEqual(foreign_reads(self.read(made, self.x), {}), (OTHER[1],))

    def test_memory_of_a_result_before_a_later_update(self):
        storage = ("mm", 1)
        made = self.make(1, storage)
        node = self.read(made, self.x)
        updated = self.update(made, 1, storage=storage)
        returned = returned_storages(self.output(self.view(updated)))
        self.assertEqual(returned, {storage: {updated}})
        self.assertEqual(foreign_reads(node, returned), (OTHER[1],))
        self.assertEqual(foreign_reads(node, {storage: {made}}), (FREED[1],))

    def test_storage_of_a_copy_in_an_update_of_lists(self):
        storage = ("mm", 1)
        for written, wanted in (("_foreach_copy_", True), (None, False)):
            made = self.make(1, storage)
            copy = self.call(aten.copy.default, made, self.x, written=written)
            output = self.output(copy)
            found = returned_storages(output)
            self.assertEqual(found, {storage: {copy}} if wanted else {})
            self.graph.erase_node(output)

    def test_what_is_kept(self):
        made, topk = self.make(1), self.call(aten.topk.default, self.x, 2)
        values = self.call(operator.getitem, topk, 0)
        saved, read = self.make(), self.make()
        backward = [self.read(self.view(saved), made), self.read(read, self.x)]
        for node in (*backward, read):
            node.meta["partitioner_tag"] = "is_backward"
        output = self.output(self.view(made), values)
        self.assertEqual(results_made(output), {made, values})
        self.assertEqual(saved_in_eager(self.graph), {saved, made, self.x})


class TestResults(EagerMemoryTestCase):
    def found(self, output, *streams):
        return [(r.result, r.streams) for r in result_memory(output, streams)]

    def test_memory_that_the_caller_gets(self):
        made = self.make(1)
        desc = [
            PlainAOTOutput(0),
            PlainAOTOutput(1),
            InputMutationAOTOutput(PlainAOTInput(0)),
            IntermediateBaseAOTOutput(PlainAOTOutput(1)),
        ]
        output = self.output(self.view(made, 2), self.x, made, made, desc=desc)
        wanted = [("output[0]", (1,)), ("__intermediate_base(output[1])", (1,))]
        self.assertEqual(self.found(output), wanted)

    def test_streams_recorded_before_the_last_update(self):
        storage = ("mm", 0)
        made = self.make(0, storage)
        self.record(self.view(made), 2)
        updated = self.update(made, 1, storage=storage)
        self.record(updated, 3)  # stays in the graph, and names this memory
        self.record(self.make(1, ("mm_1", 1)), 4)
        self.assertEqual(self.found(self.output(updated)), [("output[0]", (0, 2))])

    def test_variables_that_live_on(self):
        streams = [
            torch.Stream(stream_id=i, device_index=0, device_type=1) for i in range(2)
        ]
        for stream in streams:
            numbering.register_user_object(stream, LocalSource(f"s{stream.stream_id}"))
        self.addCleanup(numbering.reset_user_object_tracking)
        made = self.make(2)
        updated = self.update(made, 1)
        output = self.output(self.view(made, 1), updated)
        self.assertEqual(
            self.found(output, 5), [("output[0]", (2,)), ("output[1]", (2,))]
        )
        registry.current().goes_on = True
        self.assertEqual(
            self.found(output, 5), [("output[0]", (2,)), ("output[1]", (2, 0, 1, 5))]
        )


class TestRecordStream(EagerMemoryTestCase):
    def test_updated_input(self):
        record = self.record(self.update(self.view(self.x)), 1)
        record_inputs(self.graph)
        self.assertEqual(record.args, (self.x, 1))
        given = record.meta["eager_input_vals"]
        self.assertEqual(given, (("the value of x", 1), {}))

    def test_value_that_is_written_back(self):
        storage = ("x", None)
        made, same, other = self.make(), self.make(0, storage), self.make()
        self.call(aten.copy_.default, self.x, made)
        y = self.graph.placeholder("y")
        y.meta["val"] = "the value of y"
        self.call(aten.copy_.default, y, self.make(0, storage))
        self.call(aten.copy_.default, made, other)
        values = (self.view(made), same, other)
        records = [self.record(value, 1) for value in values]
        record_inputs(self.graph)
        self.assertEqual([r.args[0] for r in records], [self.x, y, other])
        self.assertNotIn("eager_input_vals", records[2].meta)


if __name__ == "__main__":
    run_tests()
