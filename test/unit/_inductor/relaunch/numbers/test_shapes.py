"""`_inductor.relaunch.numbers`: sizes and launches as functions of a call's numbers."""

import threading

import torch
from torch._inductor.runtime.triton_compat import Config
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate, Unfit
from torch_overlay._inductor.relaunch.numbers.launches import Launches, noted
from torch_overlay._inductor.relaunch.numbers.shapes import NoOperators, Shapes
from torch_overlay._inductor.relaunch.numbers.traced import Escaped, Traced


SIGNATURE = {"in_ptr0": "*fp32", "ks0": "i64", "xnumel": "i32", "XBLOCK": "constexpr"}


class StaticKernel:
    """As much of StaticallyLaunchedTritonKernel as is there without a device."""

    arg_names, declared_constexprs, full_constexprs = list(SIGNATURE), (3,), {3}
    cubin_path, hash, n_regs, n_spills, shared = "there", "0" * 64, 0, 0, 0

    def __init__(self, graph, arg_tys, nodes):
        self.graph, self.arg_tys, self.nodes = graph, arg_tys, nodes
        self.launched = []  # (grid, arguments)

    def load_kernel(self, device):
        pass

    def run(self, x, y, z, stream, *args):
        self.launched.append(((x, y, z), args))
        self.graph += [100 + len(self.graph) + i for i in range(self.nodes)]


class Kernel:
    """What generated code has as a global."""

    def __init__(self, graph, arg_tys="Oli", nodes=1):
        self.static = StaticKernel(graph, arg_tys, nodes)
        meta = {"device": 0, "device_type": "cuda", "signature": SIGNATURE}
        meta["constants"] = {"XBLOCK": 128}
        config, grid = Config({"XBLOCK": 128}), {"grid_type": "Grid1D"}
        result = StaticTritonCompileResult(self.static, config, meta, grid)
        self.launchers = [result.make_launcher()]

    def run(self, *args, stream):
        for launcher in self.launchers:
            launcher(*args, stream=stream)


class TestLaunches(TestCase):
    def trace(self, *args, before=lambda kernel: None, **options):
        """Launch a kernel with these arguments while launches are noted."""
        graph = [99]
        kernel = Kernel(graph, **options)
        namespace = {"kernel": kernel, "torch": object()}
        launches = Launches(lambda: graph)
        before(kernel)
        try:
            with noted(namespace, launches):
                self.assertIsNot(namespace["kernel"], kernel)
                namespace["kernel"].run(*args, stream=7)
        finally:
            self.assertIs(namespace["kernel"], kernel)
        return launches.uses, kernel.static.launched

    def escapes(self, how, *args, **options):
        with self.assertRaisesRegex(Escaped, how) as caught:
            self.trace(*args, **options)
        self.assertEqual(caught.exception.positions, {4})

    def test_parameter(self):
        n = Traced.input(4, 5)
        (use,), launched = self.trace("buffer", 2 * n + 1, 300)
        self.assertEqual(launched, [((3, 1, 1), ("buffer", 11, 300))])
        self.assertEqual((use.handle, use.parameter, use.letter), (101, 1, "l"))
        self.assertEqual([evaluate(use.expression, {4: n}) for n in (5, 8)], [11, 17])

    def test_launch_without_a_traced_number(self):
        uses, launched = self.trace("buffer", 11, 300)
        self.assertEqual((uses, len(launched)), ([], 1))

    def test_grid(self):
        self.escapes("grid", "buffer", 11, Traced.input(4, 300))

    def test_type_that_is_not_converted(self):
        self.escapes("type", "buffer", Traced.input(4, 5), 300, arg_tys="Oei")

    def test_launch_that_makes_several_nodes_or_none(self):
        for nodes in (0, 2):
            self.escapes("unknown way", "buffer", Traced.input(4, 5), 300, nodes=nodes)

    def test_launchers_of_another_kind(self):
        def others(kernel):
            kernel.launchers[0]._is_static = False

        def several(kernel):
            kernel.launchers.append(lambda *args, stream: None)

        args = "buffer", Traced.input(4, 5), 300
        self.escapes("static launcher", *args, before=others)
        self.escapes("unknown way", *args, before=several)

    def test_other_threads(self):
        graph, launches = [99], Launches(lambda: graph)
        namespace = {"kernel": Kernel(graph)}
        with noted(namespace, launches):
            run, failed = namespace["kernel"].run, []

            def launch():
                try:
                    run("buffer", Traced.input(4, 5), 300, stream=7)
                except Escaped as error:
                    failed.append(error)

            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
        self.assertEqual((launches.uses, failed), ([], []))
        ((_, args),) = namespace["kernel"].static.launched
        self.assertIsInstance(args[1], Traced)  # as the thread passed it

    def test_kernels_are_back_after_an_error(self):
        with self.assertRaises(TypeError):
            self.trace("too few")


class TestSizes(TestCase):
    """Numbers that are sizes: of what is allocated, of views, of grids."""

    def setUp(self):
        super().setUp()
        self.graph, self.shapes = [99], Shapes()
        self.kernel = Kernel(self.graph)
        self.launches = Launches(lambda: self.graph, self.shapes)
        guards = torch._C._dynamo.guards
        self.namespace = {
            "kernel": self.kernel,
            "reinterpret_tensor": guards._reinterpret_tensor,
        }
        self.namespace["assert_size_stride"] = guards.assert_size_stride
        self.n = Traced.input(4, 300)

    def test_view_and_grid(self):
        buffer, n = torch.empty(600), self.n
        with noted(self.namespace, self.launches):
            self.shapes.allocated(buffer, (2 * n,), (1,))
            self.namespace["assert_size_stride"](buffer, (2 * n,), (1,))
            view = self.namespace["reinterpret_tensor"](buffer, (n,), (1,), n)
            self.namespace["kernel"].run(view, 11, n, stream=7)
        self.assertEqual((view.size(), view.storage_offset()), ((300,), 300))
        self.assertEqual(self.kernel.static.launched, [((3, 1, 1), (view, 11, 300))])
        found = {(use.parameter, use.letter): use.expression for use in self.launches.uses}
        self.assertEqual(list(found), [(-1, "i"), (2, "i")])
        blocks = [evaluate(found[-1, "i"], {4: size}) for size in (1, 128, 129, 1000)]
        self.assertEqual(blocks, [1, 1, 2, 8])
        ((handle, parameter, offset),) = self.launches.offsets
        self.assertEqual((handle, parameter, evaluate(offset, {4: 7})), (101, 0, 28))
        self.assertEqual(self.shapes.dims(buffer).bytes().value, 2400)
        self.assertIsNone(self.shapes.dims(torch.empty(3)))

    def test_size_of_nothing_is_unfit(self):
        with noted(self.namespace, self.launches):
            self.shapes.allocated(torch.empty(300), (self.n,), (1,))
        (decision,) = self.shapes.decisions
        self.assertEqual(evaluate(decision, {4: 1}), 1)
        with self.assertRaises(Unfit):
            evaluate(decision, {4: 0})

    def test_comparison_is_noted(self):
        with noted(self.namespace, self.launches):
            self.assertEqual(max(self.n, 16).value, 300)
        (decision,) = self.shapes.decisions
        evaluate(decision, {4: 17})
        with self.assertRaises(Unfit):
            evaluate(decision, {4: 15})
        with self.assertRaises(Escaped):
            max(self.n, 16)

    def test_operators_end_the_tracing(self):
        x = torch.ones(3)
        with NoOperators(), self.assertRaisesRegex(Escaped, "aten.sin"):
            x.sin()

    def test_functions_are_back(self):
        before = dict(self.namespace)
        with noted(self.namespace, self.launches):
            self.assertNotEqual(self.namespace, before)
        self.assertEqual(self.namespace, before)
