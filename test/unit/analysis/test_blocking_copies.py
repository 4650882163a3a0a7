"""`analysis.blocking_copies`: copies that block the host are reported, with a reason."""

import torch
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import Program
from torch_overlay._inductor.streams.copies_in_place import READ_LATER
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, upload_returned_memory_at_once
from torch_overlay.analysis.blocking_copies import blocking_copies, BlockingCopy, reason


aten = torch.ops.aten
CPU = torch.device("cpu")
NOT_PINNED = "the host memory isn't pinned"
GATHERED = "the host copies elements that don't lie next to each other one by one, in eager, too"


class CopyLogTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.y = self.program.input(4, 8)
        self.host = self.program.input(4, 8, device="cpu")

    def copy(self, memory, source, view=lambda t: t):
        """A copy that doesn't block, into a part of memory."""
        node = self.program.call(COPY_ASYNC, memory, source)
        with self.program.mode:
            node.meta[DESTINATION] = view(memory.meta["val"])
        return node


class TestCopiesInMemory(CopyLogTestCase):
    def test_memory_of_the_caller(self):
        for memory, source in ((self.host, self.y), (self.y, self.host)):
            self.assertEqual(reason(self.copy(memory, source)), "")

    def test_memory_of_the_graph(self):
        made = self.program.call(aten.sin.default, self.host)
        for memory, source in ((made, self.y), (self.y, made)):
            self.assertEqual(reason(self.copy(memory, source)), NOT_PINNED)
        made.kwargs = {"pin_memory": True}
        for memory, source in ((made, self.y), (self.y, made)):
            self.assertEqual(reason(self.copy(memory, source)), "")

    def test_elements_that_are_gathered(self):
        row = self.program.call(aten.select.int, self.y, 0, 0)
        column = self.program.call(aten.select.int, self.y, 1, 0)
        into_row = self.copy(self.host, row, lambda t: t[1])
        into_column = self.copy(self.host, column, lambda t: t[:, 1])
        self.assertEqual((reason(into_row), reason(into_column)), ("", GATHERED))
        # The device gathers its side by itself.
        into_row = self.copy(self.host, column, lambda t: t[0, :4])
        self.assertEqual(reason(into_row), "")

    def test_elements_of_the_source(self):
        column = self.program.call(aten.select.int, self.host, 1, 0)
        found = reason(self.copy(self.y, column, lambda t: t[:, 1]))
        self.assertEqual(found, GATHERED)

    def test_memory_laid_out_alike(self):
        turned = self.program.call(aten.t.default, self.y)
        self.assertEqual(reason(self.copy(self.host, turned, torch.t)), "")
        other = self.program.input(8, 4)
        self.assertEqual(reason(self.copy(self.host, other, torch.t)), GATHERED)

    def test_another_type(self):
        values = self.program.input(4, 8, dtype=torch.float64)
        turned = self.program.call(aten.t.default, values)
        self.assertEqual(reason(self.copy(self.host, turned, torch.t)), GATHERED)

    def test_old_value_that_is_read_later(self):
        node = self.copy(self.host, self.y)
        node.meta[READ_LATER] = True
        self.assertIn("what was in the host memory before is read later", reason(node))


class TestOtherCopies(CopyLogTestCase):
    def test_number(self):
        node = self.program.graph.call_function(aten._local_scalar_dense.default, (self.y,))
        self.assertEqual(reason(node), "the host reads the number")

    def test_copies_as_values(self):
        blocking, other = (
            self.program.call(aten._to_copy.default, self.y, device=CPU, non_blocking=b) for b in (False, True)
        )
        self.assertEqual(reason(blocking), "it is made without non_blocking=True")
        self.assertEqual(reason(other), "")

    def test_program_without_streams(self):
        node = self.program.call(aten.copy.default, self.host, self.y, True)
        self.assertIn("the function uses no stream", reason(node))

    def test_upload_of_memory_that_the_caller_gets(self):
        made = self.program.call(aten.sin.default, self.host)
        device = torch.device("cuda")
        options = {"device": device, "non_blocking": True}
        node = self.program.call(aten._to_copy.default, made, **options)
        self.program.output(made, node)
        upload_returned_memory_at_once(self.program.graph)
        self.assertIn("the caller gets the host memory", reason(node))

    def test_no_copy(self):
        self.assertEqual(reason(self.program.call(aten.sin.default, self.y)), "")
        self.assertEqual(reason(self.y), "")


class TestGraphs(CopyLogTestCase):
    def test_copies_of_a_graph(self):
        first = self.program.call(aten._to_copy.default, self.y, device=CPU)
        first.meta["stack_trace"] = "line 1"
        second = self.program.call(aten._to_copy.default, self.y, device=CPU)
        self.program.output(first, second)
        why = "it is made without non_blocking=True"
        wanted = [BlockingCopy("line 1", why), BlockingCopy("", why)]
        module = torch.fx.GraphModule(torch.nn.Module(), self.program.graph)
        self.assertEqual(blocking_copies(module), wanted)
        self.assertEqual(blocking_copies(torch.nn.ModuleList([module, module])), wanted)
