# Owner(s): ["module: inductor"]

import torch
from torch._inductor.cudagraph_relaunch.rewrites import (
    LARGEST,
    Resident,
    rewrite,
    Rewrites,
)
from torch._subclasses import FakeTensorMode
from torch.testing._internal.common_utils import run_tests, TestCase


aten, put = torch.ops.aten, torch.ops.prims.device_put.default
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Program:
    """An FX graph of fake tensors. Each call has the line of its number."""

    def __init__(self):
        self.graph, self.mode, self.inputs = torch.fx.Graph(), FakeTensorMode(), []

    def value(self, device, *size, dtype=torch.float32):
        with self.mode:
            return torch.empty(size, device=device, dtype=dtype)

    def input(self, device, *size, value=None, **kwargs):
        node = self.graph.placeholder(f"arg{len(self.inputs)}")
        made = self.value(device, *size, **kwargs) if value is None else value
        node.meta["val"] = made
        self.inputs.append(made)
        return node

    def call(self, target, *args, device=CUDA, size=(4,), **meta):
        node = self.graph.call_function(target, args)
        line = len(self.graph.nodes)
        trace = f'  File "/model.py", line {line}, in f\n    y = g(x)\n'
        node.meta |= {"val": self.value(device, *size), "stack_trace": trace, **meta}
        return node

    def rewrite(self, *outputs, donated=()):
        self.graph.output(outputs)
        self.gm = torch.fx.GraphModule({}, self.graph)
        found, self.changed = rewrite(self.gm, self.inputs, donated)
        self.targets = [
            n.target for n in self.gm.graph.nodes if n.op == "call_function"
        ]
        (output,) = self.gm.graph.find_nodes(op="output")
        self.outputs = output.args[0]
        return found


class RewriteTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.x = self.program.input(CUDA, 4)

    def kinds(self, *outputs, **kwargs):
        found = self.program.rewrite(*outputs, **kwargs)
        self.assertTrue(all("/model.py:" in line for _, line in found.made))
        return [kind for kind, _ in found.made]

    def copied(self, node, **kwargs):
        """What is added to a copy of an input on the device."""
        copy = self.program.call(put, node, CUDA, **kwargs)
        return self.program.call(aten.add.Tensor, self.x, copy)


class TestResident(RewriteTestCase):
    def test_input_that_is_copied(self):
        h = self.program.input(CPU, 4)
        found = self.program.rewrite(self.copied(h))
        self.assertEqual(found.resident[0].position, 1)
        self.assertEqual(found.resident[0].outputs, ())
        self.assertEqual(self.program.changed[1].device, CUDA)
        self.assertEqual(self.program.changed[1].size(), (4,))
        self.assertIs(self.program.changed[0], self.program.inputs[0])
        self.assertEqual(self.program.targets, [aten.clone.default, aten.add.Tensor])

    def test_scalar(self):
        s = self.program.input(CPU)
        product = self.program.call(aten.mul.Tensor, self.x, s)
        self.assertEqual(self.kinds(product), ["resident"])
        self.assertEqual(self.program.targets, [aten.mul.Tensor])

    def test_input_that_is_returned(self):
        """The caller gets the tensor that it passed."""
        h = self.program.input(CPU, 4)
        found = self.program.rewrite(h, total := self.copied(h), h)
        self.assertEqual(found.resident[0].outputs, (0, 2))
        self.assertEqual(self.program.outputs, (None, total, None))

    def test_donated_input(self):
        for donated, kinds in (((0,), ["resident"]), ((1,), [])):
            self.setUp()
            h = self.program.input(CPU, 4)
            self.assertEqual(self.kinds(self.copied(h), donated=donated), kinds)

    def test_what_stays(self):
        gaps = self.program.value(CPU, 8)
        with self.program.mode:
            gaps = gaps[::2]
        for make, use in (
            (
                {"size": (4,)},
                lambda h: self.program.call(aten.sin.default, h, device=CPU),
            ),
            ({"size": (LARGEST // 4 + 1,)}, self.copied),
            ({"size": (0,)}, self.copied),
            ({"size": (4,), "dtype": torch.complex64}, self.copied),
            ({"value": gaps}, self.copied),
            (
                {"size": (4,)},
                lambda h: self.program.call(aten.copy_.default, h, self.x),
            ),
        ):
            self.setUp()
            value, size = make.get("value"), make.get("size", ())
            if value is not None:
                self.program.mode = value.fake_mode
            dtype = make.get("dtype", torch.float32)
            h = self.program.input(CPU, *size, value=value, dtype=dtype)
            self.assertEqual(self.kinds(self.copied(h), use(h)), [])
            self.assertIs(self.program.changed[1], self.program.inputs[1])

    def test_largest(self):
        h = self.program.input(CPU, LARGEST // 4)
        self.assertEqual(self.kinds(self.copied(h)), ["resident"])

    def test_graph_with_streams(self):
        h = self.program.input(CPU, 4)
        other = self.copied(h, custom={"stream": 1})
        self.assertEqual(self.program.rewrite(other), Rewrites())

    def test_graph_of_the_device_alone(self):
        sine = self.program.call(aten.sin.default, self.x)
        self.assertEqual(self.program.rewrite(sine), Rewrites())


class TestIndex(RewriteTestCase):
    def test_rows(self):
        rows = self.program.input(CPU, 3, dtype=torch.int64)
        taken = self.program.call(aten.index.Tensor, self.x, [rows])
        found = self.program.rewrite(taken)
        self.assertEqual([kind for kind, _ in found.made], ["index", "resident"])
        self.assertEqual(self.program.targets, [aten.clone.default, aten.index.Tensor])
        ((index,),) = taken.args[1:]
        self.assertEqual(index.meta["val"].device, CUDA)
        self.assertIn("/model.py:", found.made[0].line)

    def test_mask(self):
        """How many rows there are, the host has to know."""
        mask = self.program.input(CPU, 4, dtype=torch.bool)
        self.assertEqual(
            self.kinds(self.program.call(aten.index.Tensor, self.x, [mask])), []
        )

    def test_tensor_on_the_host(self):
        table = self.program.input(CPU, 4)
        rows = self.program.input(CPU, 3, dtype=torch.int64)
        taken = self.program.call(aten.index.Tensor, table, [rows], device=CPU)
        self.assertEqual(self.kinds(taken), [])


class TestRoundTrip(RewriteTestCase):
    def trip(self, *shapes, change=None):
        node = self.program.call(put, self.x, CPU, device=CPU)
        for target, *args in shapes:
            node = self.program.call(target, node, *args, device=CPU, size=(1, 4))
        if change is not None:
            node = self.program.call(change, node, device=CPU)
        return self.program.call(put, node, CUDA)

    def test_nothing_changed(self):
        self.assertEqual(self.kinds(self.trip()), ["round-trip"])
        self.assertEqual(self.program.targets, [aten.clone.default])

    def test_another_shape(self):
        node = self.trip((aten.view.default, [1, 4]))
        self.assertEqual(self.kinds(node), ["round-trip"])
        self.assertEqual(self.program.targets, [aten.view.default, aten.clone.default])
        self.assertEqual(node.args[0].meta["val"].device, CUDA)

    def test_value_that_the_host_changed(self):
        self.assertEqual(self.kinds(self.trip(change=aten.neg.default)), [])

    def test_what_else_reads_the_copy_on_the_host(self):
        node = self.trip()
        on_host = node.args[0]
        self.assertEqual(self.kinds(node, on_host), ["round-trip"])
        self.assertIn(on_host, self.program.outputs)


class TestPlain(TestCase):
    def test_pickle(self):
        found = Rewrites((), (Resident(1, 0, (2,)),))
        self.assertEqual(Rewrites.read(found.plain()), found)
        self.assertEqual(type(found.plain()[1][0]), tuple)
        self.assertEqual(Rewrites.read(()), Rewrites())


if __name__ == "__main__":
    run_tests()
