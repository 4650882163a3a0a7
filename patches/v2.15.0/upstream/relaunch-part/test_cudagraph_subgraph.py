# Owner(s): ["module: inductor"]

import importlib.util
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch.driver import Driver, DriverError
from torch._inductor.cudagraph_relaunch.nodes import EmptyNode, Template
from torch._inductor.cudagraph_relaunch.subgraph import Part
from torch.testing._internal.common_utils import run_tests, TestCase


HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)


class Api:
    """cuda.bindings.driver for graphs that are lists of nodes. The clone of a node is
    the node + 1000 times the clone's handle."""

    def __init__(self, failing=""):
        from cuda.bindings import driver

        self.real, self.failing = driver, failing
        self.graphs = {1: [11, 12, 13, 14]}
        self.executables = {}  # the nodes of the graph
        self.launched = []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def answer(self, name, *values):
        result = self.real.CUresult
        failed = name == self.failing
        code = result.CUDA_ERROR_OUT_OF_MEMORY if failed else result.CUDA_SUCCESS
        return (code, *values)

    def cuGraphClone(self, graph):
        made = 100 + len(self.graphs)
        self.graphs[made] = [n + 1000 * made for n in self.graphs[int(graph)]]
        return self.answer("clone", self.real.CUgraph(made))

    def cuGraphGetNodes(self, graph, count):
        nodes = self.graphs[int(graph)]
        handles = [self.real.CUgraphNode(n) for n in nodes][:count]
        return self.answer("nodes", handles, len(nodes))

    def cuGraphNodeFindInClone(self, node, graph):
        made = self.real.CUgraphNode(int(node) + 1000 * int(graph))
        return self.answer("find", made)

    def cuGraphDestroyNode(self, node):
        for nodes in self.graphs.values():
            if int(node) in nodes:
                nodes.remove(int(node))
        return self.answer("destroy")

    def cuGraphInstantiate(self, graph, flags):
        made = 7000 + len(self.executables)
        self.executables[made] = list(self.graphs[int(graph)])
        return self.answer("instantiate", self.real.CUgraphExec(made))

    def cuGraphLaunch(self, executable, stream):
        self.launched.append((int(executable), int(stream)))
        return self.answer("launch")

    def cuGraphExecDestroy(self, executable):
        self.executables[int(executable)] = None
        return self.answer("end")

    def cuGraphDestroy(self, graph):
        del self.graphs[int(graph)]
        return self.answer("end")


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestPart(TestCase):
    def make(self, api, nodes):
        return Part(1, nodes, SimpleNamespace(device="cuda:1"), Driver(api))

    def test_it_has_its_own_nodes_alone(self):
        api = Api()
        part = self.make(api, [12, 14])
        executable = part.raw_cuda_graph_exec()
        self.assertEqual([n % 1000 for n in api.executables[executable]], [12, 14])
        self.assertEqual(api.graphs[1], [11, 12, 13, 14])  # as it was

    def test_handles_of_the_clone(self):
        part = self.make(Api(), [12, 14])
        nodes = EmptyNode(0, 12), EmptyNode(5, 14)
        renamed = part.renamed(Template(1, nodes, ()))
        skip = 1000 * part.clone
        self.assertEqual([n.handle for n in renamed.nodes], [12 + skip, 14 + skip])
        self.assertEqual([n.index for n in renamed.nodes], [0, 5])

    def test_launch(self):
        api = Api()
        part = self.make(api, [12])
        stream = mock.Mock(return_value=SimpleNamespace(cuda_stream=0x57))
        with mock.patch.object(torch.cuda, "current_stream", stream):
            part.replay()
        stream.assert_called_once_with("cuda:1")
        self.assertEqual(api.launched, [(part.raw_cuda_graph_exec(), 0x57)])

    def test_executable_that_is_made_anew(self):
        api = Api()
        part = self.make(api, [12])
        first = part.raw_cuda_graph_exec()
        api.graphs[part.clone].clear()
        part.instantiate()
        self.assertEqual(api.executables, {first: None, part.raw_cuda_graph_exec(): []})

    def test_all_goes_with_it(self):
        for end in (Part.reset, Part.__del__):
            api = Api()
            part = self.make(api, [11])
            end(part)
            end(part)
            self.assertEqual((list(api.graphs), *api.executables.values()), ([1], None))

    def test_nothing_stays_of_what_cannot_be_made(self):
        for failing in ("find", "destroy", "instantiate"):
            api = Api(failing)
            with self.assertRaisesRegex(DriverError, "OUT_OF_MEMORY"):
                self.make(api, [11])
            self.assertEqual(list(api.graphs), [1])

    def test_end_of_the_process(self):
        api = Api()
        part = self.make(api, [11])
        api.failing = "end"  # the driver is unloaded
        with self.assertRaises(DriverError):
            part.reset()
        self.make(api, [11]).__del__()


if __name__ == "__main__":
    run_tests()
