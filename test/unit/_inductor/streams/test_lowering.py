"""Lowering of graphs with streams: buffers, copies, and updates in place."""

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import Program
from torch_overlay import config
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, record, state
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC
from torch_overlay.analysis.blocking_copies import blocking_copies


aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
R5, C0 = record(5, 0), blocking_copy(0)
CPU = torch.device("cpu")
PLACED = {"after": (), "promised_to": ()}


@config.patch(streams=True, fold_branches_below_us=0.0)
class LoweringTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.input = self.program.input

    def call(self, target, *args, stream=0, options=(), **fact):
        node = self.program.call(target, *args, stream=stream, **dict(options))
        note_fact(node, **PLACED | fact)
        return node

    def product(self, stream=0):
        return self.call(aten.mm.default, *[self.input(4, 4)] * 2, stream=stream)

    def lowered(self, *results, **options):
        """What is computed by each operation, by the last node of it."""
        with self.program.scheduled(*results, **options):
            self.graph = V.graph
            place = {node: i for i, node in enumerate(V.graph.module.graph.nodes)}
            return [max((n for n in op.get_origins() if n in place), key=place.get) for op in V.graph.operations]


class TestBuffers(LoweringTestCase):
    def for_another_stream(self, side):
        value = self.call(aten.sin.default, self.input(4), stream=side)
        product = self.product(side)
        reader = self.call(aten.cos.default, value)
        return value, product, reader, self.lowered(product, reader)

    def test_value_for_another_stream(self):
        value, product, reader, found = self.for_another_stream(side=1)
        self.assertEqual(found, [value, product, reader])

    def test_value_for_the_same_stream(self):
        value, product, reader, found = self.for_another_stream(side=0)
        self.assertEqual(found, [product, reader])

    def covered(self, **fact):
        value = self.call(aten.sin.default, self.input(4), **fact)
        visible = self.call(streams.record_event.default, 5, 1, stream=1, requires=R5)
        reader = self.call(aten.cos.default, value)
        return value, visible, reader, self.lowered(reader)

    def test_value_that_a_record_covers(self):
        value, visible, reader, found = self.covered(promised_to=(R5,))
        self.assertEqual(found, [value, visible, reader])

    def test_value_that_it_does_not_cover(self):
        value, visible, reader, found = self.covered()
        self.assertEqual(found, [visible, reader])

    @config.patch(streams=False)
    def test_without_the_option(self):
        value, visible, reader, found = self.covered(promised_to=(R5,))
        self.assertEqual(found, [visible, reader])

    def test_layout_of_memory_that_record_stream_names(self):
        """A view stands for the memory, whose layout is that of eager."""
        x = self.input(4, 6)
        turned = self.call(aten.permute.default, x, [1, 0])
        value = self.call(aten.sin.default, turned, stream=1)
        row = self.call(aten.slice.Tensor, value, 0, 1, 3)
        mark = self.call(streams.record_stream.default, row, 1)
        self.lowered(value)
        self.assertIs(mark.args[0], value)
        (made,) = (op for op in self.graph.operations if value in op.get_origins())
        self.assertEqual(tuple(made.get_stride()), value.meta["val"].stride())
        self.assertIsInstance(made.layout, ir.FixedLayout)


class TestCopies(LoweringTestCase):
    def constant(self, **fact):
        """A constant on the device that is copied to the host."""
        options = {"dtype": torch.float32, "device": torch.device("cuda:0")}
        made = self.call(aten.full.default, [4], 2.0, options=options, stream=1)
        copy = self.call(prims.device_put.default, made, CPU, False, stream=1, **fact)
        self.lowered(self.call(aten.sin.default, copy))
        return {op.get_device().type for op in self.graph.operations}

    def test_constant_that_the_host_waits_for(self):
        self.assertEqual(self.constant(requires=C0), {"cpu", "cuda"})

    def test_constant_that_nobody_waits_for(self):
        self.assertEqual(self.constant(), {"cpu"})

    def test_copy_into_the_memory_that_the_program_names(self):
        host = self.input(4, device="cpu")
        value = self.call(aten.sin.default, self.input(4), stream=1)
        copy = self.call(aten.copy.default, host, value, True, stream=1)
        back = self.call(aten.copy_.default, host, copy)
        self.lowered(value)
        targets = [n.target for n in self.graph.module.graph.nodes]
        self.assertIn(COPY_ASYNC, targets)
        self.assertNotIn(aten.copy.default, targets)
        self.assertTrue(back._erased)

    def test_upload_of_memory_that_the_caller_gets(self):
        """The caller may write there at once."""
        for returned in (True, False):
            self.setUp()
            made = self.call(aten.sin.default, self.input(4, device="cpu"))
            args = made, torch.device("cuda:0"), True
            upload = self.call(prims.device_put.default, *args, stream=1)
            self.lowered(*([made] if returned else []), upload)
            self.assertEqual(upload.args[2], not returned)

    def test_copies_that_are_reported(self):
        copy = self.call(prims.device_put.default, self.input(4), CPU, False, stream=1)
        self.lowered(copy)
        (found,) = blocking_copies(self.graph.module)
        self.assertIn("non_blocking=True", found.reason)


class TestParts(LoweringTestCase):
    def product_into_part(self, side=1, read_later=False):
        x, a = self.input(8, 4), self.input(4, 4)
        part = self.call(aten.slice.Tensor, x, 0, 0, 4)
        product = self.call(aten.mm.default, a, a, stream=side)
        self.call(aten.copy_.default, part, product, stream=side)
        later = [self.call(aten.sin.default, product)] if read_later else []
        self.lowered(*later, inputs_to_check=[0, 1])
        return [type(op) for op in self.graph.operations]

    def test_product_is_computed_in_its_place(self):
        self.assertEqual(self.product_into_part(), [ir.ExternKernelOut])
        (kernel,) = self.graph.operations
        self.assertEqual(kernel.get_mutation_names(), ["x0"])
        self.assertEqual(tuple(kernel.output_view.get_size()), (4, 4))

    def test_product_that_is_read_later(self):
        found = self.product_into_part(read_later=True)
        self.assertEqual(len(found), 3)

    def test_product_in_a_graph_without_streams(self):
        self.assertEqual(len(self.product_into_part(side=0)), 2)

    def test_input_of_which_a_part_is_written_is_not_copied(self):
        self.product_into_part()
        self.assertEqual(list(self.graph.inputs_to_check), [1])
        self.assertEqual(set(self.graph.unaligned_buffers), {"x0"})

    def test_inputs_of_a_graph_without_streams(self):
        self.product_into_part(side=0)
        self.assertEqual(list(self.graph.inputs_to_check), [0, 1])


class TestLastChanges(LoweringTestCase):
    def stream_of_branch(self):
        fact = {"after": (state(0),), "promised_to": (state(0),)}
        x = self.input(4)
        branch = self.call(aten.sin.default, x, stream=1, **fact)
        self.lowered(self.call(aten.add.Tensor, x, branch))
        return node_stream(branch)

    def test_small_branch(self):
        with config.patch(fold_branches_below_us=5.0):
            self.assertEqual(self.stream_of_branch(), 0)

    def test_small_branch_that_is_kept(self):
        self.assertEqual(self.stream_of_branch(), 1)

    def test_record_stands_after_what_it_covers(self):
        visible = self.call(streams.record_event.default, 5, 1, stream=1, requires=R5)
        value = self.call(aten.sin.default, self.input(4), promised_to=(R5,))
        self.assertEqual(self.lowered(value), [value, visible])
