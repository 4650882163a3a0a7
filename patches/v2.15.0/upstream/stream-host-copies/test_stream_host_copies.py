# Owner(s): ["module: inductor"]

import sympy

import torch
from torch._inductor import ir
from torch._inductor.streams.host_copies import (
    AsyncCopy,
    COPY_ASYNC,
    DESTINATION,
    is_pinned,
    MEMORY_LIKE,
    register,
    RETURNED,
    upload_returned_memory_at_once,
)
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten, prims = torch.ops.aten, torch.ops.prims


class TestOperators(TestCase):
    def test_copy(self):
        memory, source = torch.zeros(4), torch.arange(4.0)
        COPY_ASYNC(memory, source)
        self.assertEqual(memory, source)

    def test_memory_has_the_layout_of_a_value(self):
        value = torch.empty(4, 3, dtype=torch.float64).t()
        made = MEMORY_LIKE(value, False)
        self.assertEqual((made.stride(), made.dtype), (value.stride(), torch.float64))
        self.assertFalse(made.is_pinned())


class HostCopiesTestCase(TestCase):
    def setUp(self):
        super().setUp()
        register()
        self.program = Program()

    def copy(self, memory, source, part=None):
        node = self.program.call(COPY_ASYNC, memory, source)
        node.meta[DESTINATION] = memory.meta["val"] if part is None else part
        return node


class TestKernel(HostCopiesTestCase):
    def code(self, node):
        """The lines that a copy's kernel writes."""
        wrapper = V.graph.wrapper_code
        wrapper.lines = []
        node.node.codegen(wrapper)
        return [
            line for line in wrapper.lines if isinstance(line, str) and line[0] != "#"
        ]

    def scheduled(self, *results):
        self.program.output(*results)
        return self.program.scheduled()

    def test_download_of_what_the_graph_computes(self):
        host = self.program.input(4, device="cpu")
        value = self.program.call(aten.relu.default, self.program.input(4))
        self.copy(host, value)
        with self.scheduled() as scheduler:
            made, copy = scheduler.nodes
            self.assertIsInstance(copy.node, AsyncCopy)
            self.assertEqual(self.code(copy), ["x0.copy_(buf0, True)"])
            self.assertEqual(copy.node.get_mutation_names(), ["x0"])
            self.assertEqual(copy.get_device(), torch.device("cuda", 0))
            self.assertIn("buf0", {read.name for read in copy.read_writes.reads})
            self.assertIn("x0", V.graph.mutated_buffers)

    def test_upload_is_a_copy_of_its_device(self):
        memory = self.program.input(4, device="cuda:1")
        self.copy(memory, self.program.input(4, device="cpu"))
        with self.scheduled() as scheduler:
            (copy,) = scheduler.nodes
            self.assertEqual(self.code(copy), ["x0.copy_(x1, True)"])
            self.assertEqual(copy.get_device(), torch.device("cuda", 1))

    def test_part_of_the_memory(self):
        host, value = self.program.input(2, 4, device="cpu"), self.program.input(4)
        with self.program.mode:
            row = host.meta["val"][1]
        self.copy(host, value, row)
        with self.scheduled() as scheduler:
            (copy,) = scheduler.nodes
            wanted = "reinterpret_tensor(x0, (4, ), (1, ), 4).copy_(x1, True)"
            self.assertEqual(self.code(copy), [wanted])

    def test_part_of_a_view(self):
        """The memory may be named by a view that doesn't begin where the memory does."""
        host, value = self.program.input(4, 4, device="cpu"), self.program.input(4)
        rows = self.program.call(aten.slice.Tensor, host, 0, 1, 4)
        with self.program.mode:
            row = rows.meta["val"][1]
        self.copy(rows, value, row)
        with self.scheduled() as scheduler:
            (copy,) = scheduler.nodes
            self.assertEqual(copy.node.part.offset, 4)

    def test_reader_comes_after_the_copy(self):
        memory = self.program.input(4)
        self.copy(memory, self.program.input(4, device="cpu"))
        with self.scheduled(self.program.call(aten.relu.default, memory)) as scheduler:
            copy, reader = scheduler.nodes
            self.assertIsInstance(copy.node, AsyncCopy)
            self.assertIn(
                copy.get_outputs()[0].get_name(),
                {read.name for read in reader.unmet_dependencies},
            )

    def test_symbols_of_the_part(self):
        host, value = self.program.input(8, device="cpu"), self.program.input(4)
        self.copy(host, value)
        with self.scheduled() as scheduler:
            kernel = scheduler.nodes[0].node
            self.assertEqual(set(kernel.get_free_symbol_uses()), set())
            names = sympy.symbols("s0 s1 s2", integer=True, positive=True)
            size, stride, offset = names
            device = torch.device("cpu")
            kernel.part = ir.FixedLayout(
                device, torch.float32, [size], [stride], offset
            )
            self.assertEqual(set(kernel.get_free_symbol_uses()), set(names))

    def strides_of_filled_memory(self, value):
        host = self.program.input(4, 2, device="cpu")
        node = self.program.call(aten.relu.default, self.program.input(4, 2))
        node.meta["val"] = value
        self.copy(node, host)
        with self.scheduled():
            return list(V.graph.get_buffer("buf0").layout.stride)

    def test_memory_that_is_filled_has_eager_strides(self):
        value = self.program.fake((2, 4))
        with self.program.mode:
            value = value.t()
        self.assertEqual(self.strides_of_filled_memory(value), [1, 4])

    def test_memory_that_has_gaps_in_eager(self):
        value = self.program.fake((4, 4))
        with self.program.mode:
            value = value[:, ::2]
        self.assertEqual(self.strides_of_filled_memory(value), [2, 1])

    def test_pinned_memory(self):
        value = self.program.input(4, 2, device="cpu")
        made = [self.program.call(MEMORY_LIKE, value, pinned) for pinned in (0, 1)]
        with self.scheduled(*made):
            layouts = [b.get_output_spec() for b in V.graph.graph_outputs]
            self.assertEqual([layout.is_pinned for layout in layouts], [False, True])
            self.assertEqual([list(layout.size) for layout in layouts], [[4, 2]] * 2)


class TestUploads(HostCopiesTestCase):
    def upload(self, source, **kwargs):
        options = {"device": torch.device("cuda"), "non_blocking": True, **kwargs}
        return self.program.call(aten._to_copy.default, source, **options)

    def made(self):
        x = self.program.input(4, device="cpu")
        return self.program.call(aten.relu.default, x)

    def run_pass(self, *results):
        self.program.output(*results)
        upload_returned_memory_at_once(self.program.graph)

    def blocks(self, node):
        self.assertEqual(RETURNED in node.meta, not node.kwargs["non_blocking"])
        return not node.kwargs["non_blocking"]

    def test_memory_that_the_caller_gets(self):
        host, other = self.made(), self.made()
        view = self.program.call(aten.slice.Tensor, host, 0, 1, 3)
        returned, inner = self.upload(host), self.upload(other)
        self.run_pass(view, returned, inner)
        self.assertTrue(self.blocks(returned))
        self.assertFalse(self.blocks(inner))

    def test_memory_of_the_caller(self):
        x = self.program.input(4, device="cpu")
        node = self.upload(x)
        self.run_pass(x, node)
        self.assertFalse(self.blocks(node))

    def test_memory_that_eager_pins(self):
        pinned = self.program.graph.call_function(aten._pin_memory.default, ())
        asked = self.program.graph.call_function(
            aten.empty.memory_format, ([4],), {"pin_memory": True}
        )
        loaded = self.upload(self.program.input(4), device=torch.device("cpu"))
        waited = self.upload(
            self.program.input(4), device=torch.device("cpu"), non_blocking=False
        )
        made = self.made()
        copied = self.upload(made, device=torch.device("cpu"))
        other = self.program.graph.call_function(
            aten.abs.default, (self.program.input(4),), {"non_blocking": True}
        )
        other.meta["val"] = made.meta["val"]
        pinned.meta["val"] = asked.meta["val"] = made.meta["val"]
        sources = (pinned, asked, loaded, waited, made, copied, other)
        found = [True, True, True, False, False, False, False]
        self.assertEqual([is_pinned(n) for n in sources], found)
        uploads = [self.upload(n) for n in sources]
        self.run_pass(*sources, *uploads)
        self.assertEqual([not self.blocks(n) for n in uploads], found)

    def test_other_copies(self):
        host, value = self.made(), self.program.input(4)
        value = self.program.call(aten.relu.default, value)
        download = self.upload(value, device=torch.device("cpu"))
        blocking = self.upload(host, non_blocking=False)
        on_host = self.upload(host, device=torch.device("cpu"))
        to_another = self.upload(value, device=torch.device("cuda", 1))
        self.run_pass(host, value, download, blocking, on_host, to_another)
        for node in (download, on_host, to_another):
            self.assertFalse(self.blocks(node))
        self.assertNotIn(RETURNED, blocking.meta)

    def test_argument_by_position(self):
        host, device = self.made(), torch.device("cuda")
        node = self.program.call(prims.device_put.default, host, device, True)
        self.run_pass(host, node)
        self.assertEqual(node.args, (host, device, False))
        self.assertIn(RETURNED, node.meta)


if __name__ == "__main__":
    run_tests()
