# Owner(s): ["module: inductor"]

import itertools
import random
from types import SimpleNamespace

import torch
from torch._dynamo._streams.range_ops import range_mark, range_pop, range_push
from torch._functorch._streams.facts import note_fact
from torch._functorch._streams.tokens import record, synchronization
from torch._inductor import ir
from torch._inductor.streams import ranges
from torch._inductor.streams.graph_order import order_graph
from torch._inductor.utils import IndentedBuffer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.testing._internal.common_utils import run_tests, TestCase


aten, streams = torch.ops.aten, torch.ops.streams
MODE = FakeTensorMode()
H0, R5 = synchronization(0), record(5, 0)
SYNC = streams.synchronize_stream.default
DEVICE_SYNC = streams.synchronize_device.default


class GraphTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.begin()

    def begin(self):
        self.graph = Graph()
        self.x, self.host = self.input("x", "cuda:0"), self.input("host", "cpu")

    def value(self, node, device):
        with MODE:
            node.meta["val"] = torch.empty(4, device=device)
        return node

    def input(self, name, device):
        return self.value(self.graph.placeholder(name), device)

    def call(self, name, target, *args, device="cuda:0", **fact):
        node = self.value(self.graph.call_function(target, args, name=name), device)
        note_fact(node, **fact)
        return node

    def visible(self, name, order, token=None, target=streams.record_event.default):
        args = ("cuda", 0) if target is DEVICE_SYNC else (5, 0)
        args = args if target is not SYNC else (0,)
        return self.call(name, target, *args, order=order, requires=token)

    def ordered(self, *results):
        self.graph.output(results)
        order_graph(self.graph)
        self.graph.lint()
        names = [n.name for n in self.graph.nodes]
        self.assertEqual(names[-1], "output")
        return " ".join(names[2:-1])


class TestVisibleOperations(GraphTestCase):
    def test_record_comes_after_what_it_is_to_cover(self):
        self.visible("rec", 0, R5)
        a = self.call("a", aten.sin.default, self.x)
        b = self.call("b", aten.sin.default, a, before=(R5,))
        c = self.call("c", aten.sin.default, b)
        self.assertEqual(self.ordered(c), "a b rec c")

    def test_their_own_order(self):
        for name, order in (("third", 2), ("first", 0), ("second", 1)):
            self.visible(name, order)
        self.assertEqual(self.ordered(self.x), "first second third")

    def test_right_order_is_left_alone(self):
        a = self.call("a", aten.sin.default, self.x)
        self.visible("rec", 0, R5)
        b = self.call("b", aten.cos.default, self.x)
        self.assertEqual(self.ordered(b, a), "a rec b")

    def test_graph_without_visible_operations(self):
        update = self.call("update", aten.add_.Tensor, self.x, 1)
        read = self.call("read", aten.sin.default, self.x)
        self.assertEqual(self.ordered(update, read), "update read")

    def test_program_that_contradicts_itself(self):
        first = self.visible("first", 0, R5)
        second = self.visible("second", 1)
        node = self.call("a", aten.sin.default, second, before=(R5,))
        del first
        with self.assertRaisesRegex(
            AssertionError, "contradicts the order of the data"
        ):
            self.ordered(node)


class TestSynchronizations(GraphTestCase):
    def test_host_memory_is_touched_afterwards(self):
        self.visible("sync", 0, H0, SYNC)
        read = self.call("read", aten.sin.default, self.host, device="cpu")
        copy = self.call("copy", aten.sin.default, self.x, before=(H0,))
        self.assertEqual(self.ordered(read, copy), "copy sync read")

    def test_other_memory(self):
        self.visible("sync", 0, H0, SYNC)
        other = self.call("other", aten.cos.default, self.x)
        copy = self.call("copy", aten.sin.default, self.x, before=(H0,))
        self.assertEqual(self.ordered(other, copy), "other copy sync")

    def test_device(self):
        """What reads the caller's memory comes after it, on whatever stream."""
        self.visible("sync", 0, H0, DEVICE_SYNC)
        read = self.call("read", aten.cos.default, self.x)
        again = self.call("again", aten.cos.default, read)
        made = self.call("made", aten.zeros.default, [4])
        copy = self.call("copy", aten.sin.default, made, before=(H0,))
        self.assertEqual(self.ordered(again, copy), "made copy sync read again")

    def test_what_a_pass_has_merged(self):
        """A node that belongs before a synchronisation takes along what it reads.
        All else stays behind."""
        for target in (SYNC, DEVICE_SYNC):
            self.begin()
            self.visible("sync", 0, H0, target)
            read = self.call("read", aten.sin.default, self.host, device="cpu")
            made = self.call("made", aten.cos.default, self.host, device="cpu")
            merged = self.call("merged", aten.sin.default, made, before=(H0,))
            self.assertEqual(self.ordered(read, merged), "made merged sync read")

    def test_write_back_that_was_promised(self):
        for target in (SYNC, DEVICE_SYNC):
            self.begin()
            self.visible("sync", 0, H0, target)
            read = self.call("read", aten.sin.default, self.host, device="cpu")
            other = self.input("other", "cpu")
            args = aten.copy_.default, other, other
            write = self.call("write", *args, before=(H0,), device="cpu")
            found = self.ordered(read, write).replace("other ", "")
            self.assertEqual(found, "write sync read")

    def test_view_is_no_use_of_the_callers_memory(self):
        self.visible("sync", 0, H0, DEVICE_SYNC)
        view = self.call("view", aten.alias.default, self.x)
        read = self.call("read", aten.cos.default, self.x)
        copy = self.call("copy", aten.sin.default, view, before=(H0,))
        self.assertEqual(self.ordered(read, copy), "view copy sync read")

    def test_node_that_was_merged_across_a_synchronization(self):
        """Data decides: it is made of what comes before, for what comes before."""
        self.visible("sync", 0, H0, SYNC)
        both = self.call("both", aten.sin.default, self.host, device="cpu")
        copy = self.call("copy", aten.sin.default, both, before=(H0,))
        self.assertEqual(self.ordered(copy), "both copy sync")


class TestUpdates(GraphTestCase):
    def test_updates_and_reads_of_one_memory(self):
        self.visible("rec", 0, R5)
        early = self.call("early", aten.sin.default, self.x)
        view = self.call("view", aten.alias.default, self.x)
        update = self.call("update", aten.add_.Tensor, view, 1, before=(R5,))
        late = self.call("late", aten.cos.default, self.x)
        del update
        self.assertEqual(self.ordered(early, late), "early view update rec late")

    def test_two_updates(self):
        self.visible("rec", 0, R5)
        self.call("one", aten.add_.Tensor, self.x, 1)
        self.call("two", aten.mul_.Tensor, self.x, 2, before=(R5,))
        self.assertEqual(self.ordered(self.x), "one two rec")

    def test_use_that_has_to_wait(self):
        """The first of two uses is moved, and the second one with it."""
        for first, second, together in (
            (aten.add.Tensor, aten.mul_.Tensor, True),
            (aten.add_.Tensor, aten.mul_.Tensor, True),
            (aten.add_.Tensor, aten.mul.Tensor, True),
            (aten.add.Tensor, aten.mul.Tensor, False),
        ):
            self.begin()
            asked = self.visible("asked", 0, R5)
            one = self.call("one", first, self.x, asked)
            two = self.call("two", second, self.x, 2)
            last = self.call("last", aten.sin.default, self.host, before=(R5,))
            found = self.ordered(one, two, last)
            wanted = "last asked one two" if together else "two last asked one"
            self.assertEqual(found, wanted)

    def test_record_stream_neither_reads_nor_writes(self):
        self.visible("rec", 1, R5)
        self.call("update", aten.add_.Tensor, self.x, 1, before=(R5,))
        target = streams.record_stream.default
        self.call("given", target, self.x, 1, order=0)
        self.assertEqual(self.ordered(self.x), "update given rec")


class TestDrawnGraphs(GraphTestCase):
    def test_order_that_is_required(self):
        rng, moved = random.Random(0), 0
        for _ in range(300):
            self.begin()
            values, visible, carriers = [self.x], [], {}
            for i in range(rng.randrange(2, 12)):
                if rng.random() < 0.3:
                    visible.append(self.visible(f"rec{i}", len(visible), record(5, i)))
                    continue
                operand = rng.choice(values)
                tokens = [record(5, n) for n in range(12) if rng.random() < 0.1]
                values.append(
                    self.call(f"n{i}", aten.sin.default, operand, before=tuple(tokens))
                )
                for token in tokens:
                    carriers.setdefault(token, []).append(values[-1])
            before = [n.name for n in self.graph.nodes]
            self.ordered(*values)
            place = {n: i for i, n in enumerate(self.graph.nodes)}
            for one, other in itertools.pairwise(visible):
                self.assertLess(place[one], place[other])
            for node in visible:
                token = node.meta["custom"]["stream_fact"].requires
                for carrier in carriers.get(token, ()):
                    self.assertLess(place[carrier], place[node])
            names = [n.name for n in self.graph.nodes][:-1]
            plain = [[n for n in x if n[0] == "n"] for x in (before, names)]
            self.assertEqual(*plain)  # nothing has to move but the records
            moved += names != before
        self.assertGreater(moved, 100)


class TestRanges(GraphTestCase):
    def range(self, name, target, *args, order):
        return self.call(name, target, *args, order=order, range=order)

    def test_nodes_keep_to_their_range(self):
        push = self.range("push", range_push, "nvtx", "a", None, order=0)
        pop = self.range("pop", range_pop, "nvtx", order=1)
        after = self.call("after", aten.sin.default, self.x, range=2)
        inside = self.call("inside", aten.sin.default, self.x, range=1)
        first = self.call("first", aten.sin.default, self.x, range=0)
        unknown = self.call("unknown", aten.cos.default, self.x)
        found = self.ordered(after, inside, first, unknown).split()
        inside_ones = [
            found.index(n) for n in ("first", "push", "inside", "pop", "after")
        ]
        self.assertEqual(inside_ones, sorted(inside_ones))
        self.assertTrue(ranges.is_range(push) and not ranges.is_range(inside))
        self.assertEqual(ranges.number(pop), 1)
        self.assertEqual(ranges.largest([first, inside, pop, unknown]), 1)
        self.assertIsNone(ranges.largest([unknown]))

    def test_node_that_was_merged_across_the_end_of_a_range(self):
        self.range("push", range_push, "nvtx", "a", None, order=0)
        merged = self.call("merged", aten.sin.default, self.x, range=1)
        early = self.call("early", aten.sin.default, merged, range=0)
        self.assertEqual(self.ordered(early), "push merged early")

    def test_values_become_buffers_before_a_range(self):
        realized = []

        class Box(ir.TensorBox):
            def __init__(self, name):
                self.name = name

            def realize(self):
                realized.append(self.name)

        constant = self.call("zeros", aten.zeros.default, [4])
        made = self.call("made", aten.sin.default, self.x)
        number = self.call("number", aten.sin.default, self.x)
        values = {
            self.x: Box("x"),
            constant: Box("zeros"),
            made: Box("made"),
            number: 3,
        }
        ranges.realize_before(SimpleNamespace(env=values), made)
        self.assertEqual(realized, ["made"])

    def test_code(self):
        lines = []
        wrapper = SimpleNamespace(writeline=lines.append)
        root = SimpleNamespace(imports=IndentedBuffer())

        def write(overload, *args):
            node = SimpleNamespace(op_overload=overload, constant_args=args)
            return ranges.write(wrapper, root, node)

        self.assertFalse(write(aten.sin.default))
        self.assertTrue(write(range_mark, "here"))
        self.assertTrue(write(range_push, "nvtx", "a", None))
        self.assertTrue(write(range_pop, "nvtx"))
        self.assertEqual(root.imports.getvalue(), "")
        self.assertTrue(write(range_push, "record_function", "b", "why"))
        self.assertTrue(write(range_pop, "record_function"))
        wanted = [
            "torch.cuda.nvtx.mark('here')",
            "torch.cuda.nvtx.range_push('a')",
            "torch.cuda.nvtx.range_pop()",
            "push_range('record_function', 'b', 'why')",
            "pop_range('record_function')",
        ]
        self.assertEqual(lines, wanted)
        (line,) = root.imports.getvalue().splitlines()
        names = {}
        exec(line, names)
        self.assertLess({"push_range", "pop_range"}, names.keys())


if __name__ == "__main__":
    run_tests()
