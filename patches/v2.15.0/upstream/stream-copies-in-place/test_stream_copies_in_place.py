# Owner(s): ["module: inductor"]

import random
from unittest import mock

import torch
from torch._functorch._streams.facts import fact_of, note_fact
from torch._functorch._streams.fx import is_asynchronous_copy
from torch._functorch._streams.tokens import caller_event
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.streams import copies_in_place
from torch._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, MEMORY_LIKE
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten
SHAPE = (6, 4)
VIEWS = {
    "all": lambda t: t,
    "row": lambda t: t[1],
    "rows": lambda t: t[2:5],
    "columns": lambda t: t[:, 1:3],
    "steps": lambda t: t[::2],
    "element": lambda t: t[3][2],
    "row of rows": lambda t: t[2:5][1],
    "flat": lambda t: t.view(-1)[5:11],
    "turned": lambda t: t.t()[1:3],
    "diagonal": lambda t: t.diagonal(),
}
KINDS = ("copy", "copy", "copy", "write", "add", "read", "clone")


def program(steps, returned):
    """A function of two tensors and a source, with two tensors of its own. It returns
    what it read, and some of the tensors; of the caller's, copies."""

    def fn(a, b, source):
        tensors, found = [a, b, torch.zeros(SHAPE), torch.zeros(SHAPE)], []
        for kind, index, name, other, number in steps:
            view = VIEWS[name](tensors[index])
            if kind == "copy":
                given = VIEWS[name](source if other == index else tensors[other])
                if other != index and number != 1:
                    given = given + number
                view.copy_(given, non_blocking=True)
            elif kind == "write":
                view.copy_(VIEWS[name](source) * number)
            elif kind == "add":
                view.add_(number)
            elif kind == "read":
                found.append(view * number)
            else:
                tensors[2 + number % 2] = tensors[index].clone()
        return found, [tensors[i].clone() if i < 2 else tensors[i] for i in returned]

    return fn


def is_marked(node):
    """What stands for a copy between host and device that doesn't block."""
    return node.target is aten.copy.default and node.args[2:] == (True,)


def rewritten(fn, inputs, reinplaced):
    functional = torch.func.functionalize(fn, remove="mutations")
    gm = make_fx(functional, tracing_mode="fake")(*inputs)
    (mode,) = {n.meta["val"].fake_mode for n in gm.graph.find_nodes(op="placeholder")}
    is_copy = mock.patch.object(copies_in_place, "is_asynchronous_copy", is_marked)
    with V.set_fake_mode(mode), is_copy:
        if reinplaced:
            reinplace_inplaceable_ops(FakeTensorUpdater(gm), gm.graph)
        copies_in_place.make_copies_in_place(gm.graph)
    gm.graph.lint()
    return gm


class Run(torch.fx.Interpreter):
    def run_node(self, node):
        if node.target is not COPY_ASYNC:
            return super().run_node(node)
        memory, source = (self.env[n] for n in node.args)
        part, whole = node.meta[DESTINATION], node.args[0].meta["val"]
        offset = memory.storage_offset() + part.storage_offset()
        offset -= whole.storage_offset()
        memory.as_strided(part.shape, part.stride(), offset).copy_(source)


class TestValues(TestCase):
    def compare(self, steps, returned=()):
        """Run the rewritten graphs, and compare values, and which of them share memory.
        Return the graphs."""
        generator = torch.Generator().manual_seed(1)
        inputs = [
            torch.randint(0, 50, SHAPE, generator=generator).float() for _ in range(3)
        ]
        fn = program(steps, returned)
        expected = [t.clone() for t in inputs]
        wanted = fn(*expected)
        graphs = []
        for reinplaced in (False, True):
            gm = rewritten(fn, inputs, reinplaced)
            given = [t.clone() for t in inputs]
            found = Run(gm, garbage_collect_values=False).run(*given)
            self.assertEqual((found, given), (wanted, expected), str(gm.graph))
            memory = [t.untyped_storage().data_ptr() for t in (*found[1], *given)]
            own = {i if i > 1 else -n for n, i in enumerate(returned)}
            self.assertEqual(len(set(memory)), 3 + len(own))
            graphs.append(gm.graph)
        return graphs

    def test_drawn_programs(self):
        rng, written, new = random.Random(0), 0, 0
        for _ in range(80):
            steps = [
                (
                    rng.choice(KINDS),
                    rng.randrange(4),
                    rng.choice(sorted(VIEWS)),
                    rng.randrange(4),
                    rng.randrange(1, 10),
                )
                for _ in range(rng.randrange(9))
            ]
            returned = rng.sample(range(4), rng.randrange(4))
            for graph in self.compare(steps, returned):
                targets = [n.target for n in graph.nodes]
                written += targets.count(COPY_ASYNC)
                new += targets.count(MEMORY_LIKE)
        self.assertGreater(new, 10)
        self.assertGreater(written, new + 50)

    def test_nothing_is_left_of_updates_of_one_memory(self):
        steps = [("copy", i, name, i, 1) for i in (0, 2) for name in VIEWS]
        for graph in self.compare(steps, [2]):
            targets = [n.target for n in graph.nodes]
            self.assertEqual(targets.count(COPY_ASYNC), 2 * len(VIEWS), str(graph))
            for target in targets:
                self.assertNotIn("scatter", str(target))
                self.assertNotIn(target, (aten.copy.default, aten.copy_.default))

    def test_old_value_that_is_read_later(self):
        """Of the caller's memory, of memory of one's own, of equal memory."""
        copy, clone, read = "copy", "clone", "read"
        steps = (copy, 0, "row", 0, 1), (read, 3, "all", 0, 2)
        self.compare([(clone, 0, "all", 0, 1), *steps], [0, 3])
        steps = (copy, 2, "row", 2, 1), (clone, 2, "all", 0, 1), (copy, 2, "rows", 2, 1)
        self.compare(steps, [2, 3])
        steps = (copy, 3, "row", 3, 1), (copy, 2, "rows", 2, 1), (read, 3, "all", 0, 2)
        self.compare(steps, [2, 3])

    def test_new_memory_has_no_gaps(self):
        steps = ("copy", 0, "all", 2, 1), ("copy", 0, "columns", 0, 1)
        for graph in self.compare(steps):
            for node in graph.find_nodes(op="call_function", target=MEMORY_LIKE):
                self.assertTrue(node.meta["val"].is_contiguous())

    def test_copy_that_another_copy_reads(self):
        steps = [("copy", 0, "all", 0, 1), ("copy", 1, "all", 0, 1)]
        for graph in self.compare([*steps, ("copy", 0, "all", 1, 2)]):
            targets = [n.target for n in graph.nodes]
            counts = targets.count(COPY_ASYNC), targets.count(MEMORY_LIKE)
            self.assertEqual(counts, (3, 0), str(graph))

    def test_copy_that_is_overwritten_before_it_is_read(self):
        """What the last one brings is known when it is compiled."""
        steps = [("copy", 0, "all", 0, 1), ("copy", 0, "rows", 1, 1)]
        for graph in self.compare([*steps, ("copy", 0, "all", 2, 1)]):
            targets = [n.target for n in graph.nodes]
            self.assertNotIn(COPY_ASYNC, targets)

    def test_source_that_is_updated_afterwards(self):
        steps = ("copy", 0, "all", 1, 1), ("add", 1, "rows", 0, 3)
        self.compare([*steps, ("copy", 1, "row", 0, 2)], [0, 1])


class TestGraphs(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()

    def run_pass(self):
        with V.set_fake_mode(self.program.mode):
            copies_in_place.make_copies_in_place(self.program.graph)
        return [n.target for n in self.program.graph.nodes if n.op == "call_function"]

    def test_promises_of_a_copy_into_the_callers_tensor(self):
        """The last write takes them over."""
        x = self.program.input(4, device="cpu")
        value = self.program.input(4)
        copy = self.program.call(aten.copy.default, x, value, True)
        self.assertTrue(is_asynchronous_copy(copy))
        note_fact(copy, after=(), before=(caller_event(1),))
        written = self.program.call(aten.copy_.default, x, copy)
        note_fact(written, after=(), before=(caller_event(2),))
        self.program.output(written)
        self.assertEqual(self.run_pass(), [COPY_ASYNC])
        _, _, node, output = self.program.graph.nodes
        self.assertEqual(node.args, (x, value))
        self.assertEqual(fact_of(node).promises, {caller_event(1), caller_event(2)})
        self.assertEqual(output.args, ((x,),))

    def test_copies_of_what_the_device_makes_itself(self):
        x = self.program.input(4)
        zeros = self.program.graph.call_function(aten.zeros.default, ([4],))
        zeros.meta["val"] = self.program.fake([4], "cpu")
        copy = self.program.call(aten.copy.default, x, zeros, True)
        self.assertTrue(is_asynchronous_copy(copy))
        self.program.output(self.program.call(aten.copy_.default, x, copy))
        wanted = [aten.zeros.default, aten.copy.default, aten.copy_.default]
        self.assertEqual(self.run_pass(), wanted)

    def test_download_of_which_the_host_reads_more(self):
        """It goes into new memory, and the host waits."""
        x = self.program.input(4, device="cpu")
        host = self.program.call(aten.sin.default, x)
        copy = self.program.call(aten.copy.default, host, self.program.input(4), True)
        self.program.output(host, self.program.call(aten.cos.default, copy))
        wanted = [aten.sin.default, MEMORY_LIKE, COPY_ASYNC, aten.cos.default]
        self.assertEqual(self.run_pass(), wanted)
        (node,) = self.program.graph.find_nodes(op="call_function", target=COPY_ASYNC)
        self.assertIn(copies_in_place.READ_LATER, node.meta)


if __name__ == "__main__":
    run_tests()
