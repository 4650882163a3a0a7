# Owner(s): ["module: inductor"]

import gc
import importlib.util
import os
import sys
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

from torch._inductor.cudagraph_relaunch import kernel_names
from torch._inductor.cudagraph_relaunch.kernel_names import annotate, KernelLines
from torch.cuda.graph_annotations import get_kernel_annotations
from torch.testing._internal.common_utils import run_tests, TestCase


HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)
MODULE = """def call():
    # Kernel of model.py:7, layers.0
    launch()
    x = 1
    # Kernel of model.py:9
    launch(), launch()
    inner()
    outside()

def inner():
    launch()
"""


class TestLines(TestCase):
    def setUp(self):
        super().setUp()
        self.nodes = []
        self.scope = {"launch": self.launch}
        other = {"launch": self.launch}
        exec("def outside():\n    launch()", other)
        self.scope["outside"] = other["outside"]

    def launch(self):
        self.nodes.append(len(self.nodes))

    def run_module(self, source, nodes=None, path="generated"):
        """The lines of the nodes that are made at each `launch()` of a module."""
        exec(compile(source, path, "exec"), self.scope)
        before = sys.gettrace()
        lines = KernelLines(self.scope, nodes or (lambda: self.nodes))
        try:
            with lines:
                self.scope["call"]()
        finally:
            self.assertIs(sys.gettrace(), before)
        return lines

    def test_line_that_launched_a_node(self):
        made = self.run_module(MODULE).made
        found = {node: line for node, (_, line) in made.items()}
        self.assertEqual(found, {0: 3, 1: 6, 2: 6, 3: 11, 4: 8})

    def test_places(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "generated.py")
            with open(path, "w") as file:
                file.write(MODULE)
            places = self.run_module(MODULE, path=path).places()
        first, second = "model.py:7, layers.0", "model.py:9"
        self.assertEqual(places, {0: first, 1: second, 2: second, 4: second})

    def test_nodes_from_before_the_region(self):
        lines = KernelLines(self.scope, lambda: self.nodes)
        self.launch()
        exec(MODULE, self.scope)
        with lines:
            self.scope["call"]()
        self.assertNotIn(0, lines.made)

    def test_region_that_raises(self):
        with self.assertRaises(ZeroDivisionError):
            self.run_module("def call():\n    launch()\n    1 / 0")

    def test_broken_capture(self):
        nodes = mock.Mock(side_effect=RuntimeError("the capture is broken"))
        lines = self.run_module("def call():\n    launch()\n    launch()", nodes)
        self.assertEqual(lines.made, {})
        self.assertEqual(len(self.nodes), 2)
        nodes.assert_called()


class Graph:
    def raw_cuda_graph_exec(self):
        return 7


def launcher(*handles):
    nodes = [SimpleNamespace(handle=handle) for handle in handles]
    return SimpleNamespace(graph=Graph(), template=SimpleNamespace(nodes=nodes))


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestAnnotations(TestCase):
    def setUp(self):
        super().setUp()
        from cuda.bindings import runtime

        self.errors = runtime.cudaError_t
        self.status = self.errors.cudaSuccess
        for name, function in (
            ("cudaGraphExecGetId", lambda graph: (self.status, graph + 100)),
            (
                "cudaGraphNodeGetToolsId",
                lambda node: (self.status, 5 << 32 | node + 1000),
            ),
        ):
            self.enterContext(mock.patch.object(runtime, name, function, create=True))

    def tearDown(self):
        gc.collect()
        self.assertEqual(dict(get_kernel_annotations()), {})
        super().tearDown()

    def test_while_the_executable_lives(self):
        made = launcher(31, 32, 33)
        annotate({1: "a.py:1", 3: "a.py:3"}, [1, 2, 3], made)
        expected = {
            107 << 32 | 1031: [{"name": "a.py:1"}],
            107 << 32 | 1033: [{"name": "a.py:3"}],
        }
        self.assertEqual(dict(get_kernel_annotations()), expected)

    def test_other_executables_keep_theirs(self):
        kept, freed = launcher(31), launcher(41)
        freed.graph.raw_cuda_graph_exec = lambda: 8
        for made in (kept, freed):
            annotate({1: "a.py:1"}, [1], made)
        self.assertEqual(len(get_kernel_annotations()), 2)
        del freed, made
        gc.collect()
        found = dict(get_kernel_annotations())
        self.assertEqual(found, {107 << 32 | 1031: [{"name": "a.py:1"}]})

    def test_driver_that_refuses(self):
        self.status = self.errors.cudaErrorCallRequiresNewerDriver
        with self.assertLogs(kernel_names.log, "INFO") as logs:
            annotate({1: "a.py:1"}, [1], launcher(31))
        self.assertIn("a graph is not annotated", logs.output[0])


if __name__ == "__main__":
    run_tests()
