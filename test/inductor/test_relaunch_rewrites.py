"""Code that asks for CUDA graphs is rewritten to read small host tensors from copies on the device.

What a careless rewrite would get wrong is in `relaunch_programs/host.py`, which runs on a GPU.
"""

from unittest import mock

import torch
from torch._dynamo.test_case import TestCase
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._dynamo import registry
from torch_overlay._inductor.relaunch.coverage import coverage
from torch_overlay._inductor.relaunch.rewrites import resident
from torch_overlay._inductor.relaunch.rewrites.graph import LARGEST, Resident, rewrite
from torch_overlay._inductor.relaunch.rewrites.resident import MOST_CHANGES, Residents
from torch_overlay.testing import simulated_gpu


aten, put = torch.ops.aten, torch.ops.prims.device_put.default


class TestGraphs(TestCase):
    """What is rewritten, and what is left between graphs, of code that is compiled for a simulated GPU."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(registry, "_has_streams", False))

    def run_function(self, fn, *inputs, **options):
        torch._dynamo.reset()
        with config.patch(**options), torch.no_grad():
            torch.compile(fn, mode="reduce-overhead")(*inputs)
        (function,) = coverage().functions
        return function

    def check(self, fn, *inputs, kinds):
        """With the rewrites the code is one region, without any cause outside; without them it isn't."""
        function = self.run_function(fn, *inputs)
        self.assertEqual([kind for kind, _ in function.rewrites], kinds)
        self.assertTrue(all("test_relaunch_rewrites.py" in line for _, line in function.rewrites), function.rewrites)
        self.assertEqual([o for o in function.outside if o.code != "warm-up"], [])
        plain = self.run_function(fn, *inputs, cudagraph_rewrites=False)
        self.assertEqual(plain.rewrites, ())
        self.assertTrue([o for o in plain.outside if o.code.startswith("split-")])

    def test_what_is_rewritten(self):
        with simulated_gpu():
            x, h = torch.randn(64, 64, device="cuda"), torch.randn(64)
            rows, mask = torch.tensor([1, 5, 3]), torch.ones(64, dtype=torch.bool)
            for given in (h, mask):
                self.check(lambda x, h: x @ x + h.to("cuda"), x, given, kinds=["resident"])
            self.check(lambda x, h: (h, x @ x + h.to("cuda")), x, h, kinds=["resident"])
            self.check(lambda x, s: (x @ x) * s, x, torch.tensor(2.5), kinds=["resident"])
            self.check(lambda x, rows: (x @ x)[rows].sin(), x, rows, kinds=["index", "resident"])
            self.check(lambda x: (x @ x)[torch.tensor([1, 5, 3])].sin(), x, kinds=["index"])
            self.check(lambda x: x + (x @ x).sum(0).cpu().view(1, 64).to("cuda"), x, kinds=["round-trip"])

    def test_what_is_left(self):
        with simulated_gpu():
            x, h, side = torch.randn(64, 64, device="cuda"), torch.randn(64), torch.cuda.Stream()

            def written(x, h):
                y = x @ x + h.to("cuda")
                h.add_(1)
                return y

            def on_streams(x, h):
                y = x @ x
                with torch.cuda.stream(side):
                    side.wait_stream(torch.cuda.default_stream())
                    z = h.to("cuda") * 2
                torch.cuda.default_stream().wait_stream(side)
                return y + z

            for hazard, fn, *inputs in (
                ("it is written", written, x, h),
                ("it is written, with gaps", written, x, torch.randn(64, 128)[:, ::2]),
                ("it is computed with", lambda x, h: x @ x + h.sin().to("cuda"), x, h),
                ("it is changed on the host", lambda x: x + ((x @ x).sum(0).cpu() * 2).to("cuda"), x),
                ("it is for a stream", on_streams, x, h),
                ("it is large", lambda x, h: x.sum() + h.to("cuda"), x, torch.randn(1 << 19)),
            ):
                with self.subTest(hazard):
                    self.assertEqual(self.run_function(fn, *inputs).rewrites, ())

    def test_numbers_that_change_are_computed_with_on_the_device(self):
        """One launch, in whatever form a number comes, and of a backward that reads what was computed from it, too."""

        def scaled(x, t):
            return (x @ x) * t

        def formula(x, t):
            return (x @ x).sin() * (t * 2 + 1) - t

        def item(x, t):
            return formula(x, t.item())

        def returned(x, t):
            return (x @ x) * (t * 2), t

        forms = {float: "Python float", torch.tensor: "tensor", lambda v: torch.tensor([v]): "tensor of one element"}
        reads_number = torch._dynamo.config.patch(capture_scalar_outputs=True)
        with simulated_gpu(), reads_number:
            x = torch.randn(64, 64, device="cuda", requires_grad=True)
            for fn, form_of in (
                *((fn, form_of) for fn in (scaled, formula, returned) for form_of in (float, torch.tensor)),
                *((item, form_of) for form_of in forms if form_of is not float),
            ):
                for trains in (False, True) if fn is scaled else (True,):
                    torch._dynamo.reset()
                    compiled = torch.compile(fn, mode="reduce-overhead")
                    for value in (0.5, 0.75, 1.25):
                        with torch.set_grad_enabled(trains):
                            y = compiled(x, form_of(value))
                        if trains:
                            (y[0] if fn is returned else y).sum().backward()
                    with self.subTest(fn=fn.__name__, form=forms[form_of], trains=trains):
                        functions = coverage().functions
                        self.assertEqual([f.outside for f in functions], [()] * len(functions), str(coverage()))
                        self.assertEqual({r.launches for f in functions for r in f.regions}, {1})
                        lines = {line for f in functions for kind, line in f.rewrites}
                        self.assertTrue(lines and all("test_relaunch_rewrites.py" in line for line in lines), lines)

    def test_numbers_that_change_after_another_function_had_streams(self):
        """The host reads a number of its own memory, and waits for no stream."""
        with simulated_gpu():
            x, side = torch.randn(64, 64, device="cuda"), torch.cuda.Stream()

            @torch.compile
            def placed(x):
                with torch.cuda.stream(side):
                    return x * 2

            placed(x)
            compiled = torch.compile(lambda x, t: (x @ x) * t, mode="reduce-overhead")
            for value in (0.5, 0.75, 1.25):
                compiled(x, value)
            function = coverage().functions[-1]
            self.assertEqual((function.outside, len(function.rewrites)), ((), 1))

    def test_numbers_of_which_the_host_reads_something_are_left(self):
        with simulated_gpu():
            x, t = torch.randn(64, 64, device="cuda"), torch.tensor(0.5)
            for fn in (lambda x, t: ((x @ x) * (t * 2), t * 2), lambda x, t: (x @ x) * (x.sum().cpu() * t)):
                function = self.run_function(fn, x, t)
                self.assertEqual(function.rewrites, ())
                self.assertTrue(all("test_relaunch_rewrites.py" in each.line for each in function.outside))

    def test_number_that_is_read_of_host_memory_is_no_launch(self):
        with simulated_gpu(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            x, t = torch.randn(64, 64, device="cuda"), torch.tensor(0.5)
            function = self.run_function(lambda x, t: x + torch.full((64,), t.item(), device="cuda"), x, t)
            self.assertEqual(function.outside, ())
            function = self.run_function(lambda x: x + torch.full((64,), x.sum().item(), device="cuda"), x)
            self.assertEqual([each.kernels for each in function.outside], [1], "the host waits for this one")

    def test_donated_input_is_left(self):
        """The code of a backward may write over it."""

        def traced():
            graph = torch.fx.Graph()
            with FakeTensorMode():
                x, h = torch.empty(4, device="cuda"), torch.empty(4)
            nodes = [graph.placeholder("x"), graph.placeholder("h")]
            nodes.append(graph.call_function(torch.ops.prims.device_put.default, (nodes[1], x.device)))
            nodes.append(graph.call_function(torch.ops.aten.mul.Tensor, (nodes[0], nodes[2])))
            graph.output((nodes[3],))
            for node, value in zip(nodes, (x, h, x, x)):
                node.meta["val"] = value
            return torch.fx.GraphModule({}, graph), [x, h]

        with simulated_gpu():
            for donated, kept in (((), [1]), ((0,), [1]), ((1,), [])):
                gm, inputs = traced()
                found, changed = rewrite(gm, inputs, donated)
                self.assertEqual([row.position for row in found.resident], kept)
                self.assertEqual(changed[1].device.type, "cuda" if kept else "cpu")

    def kinds(self, inputs, build):
        """Return what is rewritten in a graph of these inputs; `build(call, *inputs)` calls its operators."""
        graph = torch.fx.Graph()

        def node(made, value):
            made.meta["val"] = value
            return made

        def call(target, *args):
            values = tree_map_only(torch.fx.Node, lambda n: n.meta["val"], args)
            return node(graph.call_function(target, args), target(*values))

        with simulated_gpu(), FakeTensorMode():
            values = inputs()
            graph.output((build(call, *[node(graph.placeholder(f"x{k}"), v) for k, v in enumerate(values)]),))
            found, _ = rewrite(torch.fx.GraphModule({}, graph), values)
        return [kind for kind, _ in found.made]

    def test_round_trip_to_another_device_is_left(self):
        for back, kinds in (("cuda:0", ["round-trip"]), ("cuda:1", [])):
            found = self.kinds(
                lambda: [torch.empty(4, device="cuda:0")],
                lambda call, x, back=back: call(put, call(put, x, torch.device("cpu")), torch.device(back)),
            )
            self.assertEqual(found, kinds)

    def test_mask_is_no_index(self):
        for dtype, kinds in ((torch.int64, ["index", "resident"]), (torch.bool, [])):
            inputs = [(4, torch.float32, "cuda:0"), (4, dtype, "cpu"), (1, torch.float32, "cuda:0")]
            found = self.kinds(
                lambda inputs=inputs: [torch.empty(n, dtype=t, device=device) for n, t, device in inputs],
                lambda call, x, rows, value: call(aten.index_put.default, x, [rows], value),
            )
            self.assertEqual(found, kinds)

    def test_input_of_two_devices_with_gaps_or_of_complex_numbers_is_left(self):
        def copied(devices=("cuda:0",), dtype=torch.float32, step=1):
            return self.kinds(
                lambda: [torch.empty(8, dtype=dtype)[::step]],
                lambda call, h: [call(put, h, torch.device(device)) for device in devices][0],
            )

        self.assertEqual(copied(), ["resident"])
        self.assertEqual(copied(("cuda:0", "cuda:1")), [])
        self.assertEqual(copied(dtype=torch.complex64), [])
        self.assertEqual(copied(step=2), [])

    def test_none_without_graphs(self):
        with simulated_gpu(), torch.no_grad():
            x, h, fn = torch.randn(64, 64, device="cuda"), torch.randn(64), lambda x, h: x @ x + h.to("cuda")
            with mock.patch.object(Residents, "around", side_effect=AssertionError):
                torch.compile(fn)(x, h)
            again = torch.compile(fn, mode="reduce-overhead")
            self.assertEqual([again(x, h).device.type for _ in range(3)], ["cuda"] * 3)

    def test_report(self):
        with simulated_gpu():
            x, h = torch.randn(64, 64, device="cuda"), torch.randn(64)
            self.run_function(lambda x, h: x @ x + h.to("cuda"), x, h)
            text = str(coverage())
        self.assertRegex(text, r"\[rewritten\] inference of compiled frame \S+ #\d+")
        self.assertRegex(text, r"    resident at \S+test_relaunch_rewrites.py:\d+: self.run_function")


class TestResidents(TestCase):
    """The copies, with the host in the place of the device."""

    def setUp(self):
        super().setUp()
        self.stream = 0
        self.residents = Residents([Resident(1, 0, ()), Resident(2, 0, (1,))])
        self.patch("_stream", lambda device: self.stream)
        self.patch("_is_capturing", lambda: False)
        self.patch("_pinned", torch.clone)
        self.patch("_copied", lambda tensor, device: tensor.clone())

    def patch(self, name, by):
        self.enterContext(mock.patch.object(resident, name, by))

    def given(self, *tensors):
        """What the compiled code gets for these inputs."""
        seen = []
        run = self.residents.around(lambda inputs: (seen.extend(inputs), None)[1:] * 2)
        self.results = run([None, *tensors])
        return seen[1:]

    def test_copy_stays_until_bytes_change(self):
        a, b = torch.arange(4.0), torch.zeros(2)
        first = self.given(a, b)
        self.assertIsNot(first[0], a)
        for again in (self.given(a, b), self.given(a.clone(), b.clone())):
            self.assertIs(again[0], first[0])
            self.assertIs(again[1], first[1])
        self.assertEqual(self.residents.copies, 2)
        a.numpy()[2] = 7
        changed = self.given(a, b)
        self.assertEqual(changed[0], a)
        self.assertIsNot(changed[0], first[0])  # who still reads the old one isn't disturbed
        self.assertEqual(first[0], torch.arange(4.0))
        self.assertIs(changed[1], first[1])

    def test_results_that_are_inputs_are_the_callers(self):
        a, b = torch.arange(4.0), torch.zeros(2)
        self.given(a, b)
        self.assertIs(self.results[1], b)

    def test_bits_types_shapes_and_strides_are_compared(self):
        b = torch.zeros(2)
        different = [torch.zeros(4), -torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]
        different += [torch.zeros(3), torch.zeros(2, 3), torch.zeros(3, 2).t()]
        for n, a in enumerate(different, 1):
            found = self.given(a, b)[0]
            self.assertEqual((found.dtype, found.stride()), (a.dtype, a.stride()))
            self.assertEqual(self.residents.copies, n + 1)

    def test_what_bytes_or_a_small_copy_do_not_show_is_not_kept(self):
        self.patch("_plain_copy", lambda tensor, device: tensor.clone())
        a, b = torch.arange(4.0), torch.zeros(2)
        kept = self.given(a, b)[0]
        for value in (torch._neg_view(a), torch.arange(8.0)[::2], torch.zeros(LARGEST // 4 + 1)):
            self.assertEqual(self.given(value, b)[0], value)
            self.assertIs(self.given(a, b)[0], kept)

    def test_streams_have_their_own(self):
        a, b = torch.arange(4.0), torch.zeros(2)
        first = self.given(a, b)[0]
        self.stream = 1
        second = self.given(a, b)[0]
        self.assertIsNot(first, second)
        self.stream = 0
        self.assertIs(self.given(a, b)[0], first)
        for self.stream in range(100):
            self.given(a, b)
        self.assertLess(len(self.residents.kept), 12)

    def test_nothing_is_kept_of_pinned_memory_nor_in_a_capture(self):
        self.patch("_plain_copy", lambda tensor, device: tensor.clone())
        scalar, table = torch.tensor(2.0), torch.arange(4.0)
        with mock.patch.object(torch.Tensor, "is_pinned", return_value=True):
            for n in range(3):
                self.given(table + n, scalar)
        self.assertEqual((self.residents.copies, self.residents.kept, self.residents.captured), (6, {}, []))
        self.patch("_is_capturing", lambda: True)
        self.assertEqual(self.given(table, scalar), [table, scalar])
        self.assertEqual((self.residents.kept, self.residents.captured), ({}, [scalar]))

    def test_what_always_changes_is_compared_no_more(self):
        b = torch.zeros(2)
        compared = []
        self.patch("_same", lambda kept, tensor, size: bool(compared.append(tensor)))
        for n in range(3 * MOST_CHANGES):
            self.assertEqual(self.residents.on_device(1, 0, torch.full((4,), float(n))), torch.full((4,), float(n)))
        self.assertEqual(len(compared), MOST_CHANGES)
        self.given(torch.zeros(4), b)

    def test_what_always_changed_and_stays_is_kept_again(self):
        for n in range(3 * MOST_CHANGES):
            self.residents.on_device(1, 0, torch.full((4,), float(n)))
        before = self.residents.copies
        for _ in range(resident.PAUSE + 2):
            self.residents.on_device(1, 0, torch.zeros(4))
        steady = self.residents.copies
        self.assertLessEqual(steady - before, resident.PAUSE + 1)
        for _ in range(20):
            self.residents.on_device(1, 0, torch.zeros(4))
        self.assertEqual(self.residents.copies, steady)
