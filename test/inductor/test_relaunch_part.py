"""A part of a captured graph becomes an executable: which nodes are left in the clone, and what is destroyed when."""

import unittest
from types import SimpleNamespace

import form  # noqa: F401
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.launch.executable import part_of
from torch_overlay._inductor.relaunch.proof.nodes import EmptyNode, Template
from torch_overlay.csrc import DriverError


class Api:
    """Graphs are lists of handles; a node's clone is its handle plus a thousand times the clone's number."""

    def __init__(self, fail=None):
        from cuda.bindings import driver

        for name in ("CUgraph", "CUgraphNode", "CUgraphExec", "CUstream"):
            setattr(self, name, getattr(driver, name))
        self.result, self.real, self.fail = driver.CUresult, driver, fail
        self.graphs = {1: [11, 12, 13, 14]}
        self.executables, self.launched = {}, []

    def answer(self, name, *values):
        failed = self.fail == name
        return (self.result.CUDA_ERROR_OUT_OF_MEMORY if failed else self.result.CUDA_SUCCESS, *values)

    def cuGraphClone(self, graph):
        new = 100 + len(self.graphs)
        self.graphs[new] = [n + 1000 * new for n in self.graphs[int(graph)]]
        return self.answer("clone", self.real.CUgraph(new))

    def cut(self, graph, clone, wanted):
        """Of the C module."""
        if self.fail == "cut":
            raise DriverError("cuGraphDestroyNode", 2, "OUT_OF_MEMORY")
        found = {node: node + 1000 * clone for node in self.graphs[graph] if node in wanted}
        self.graphs[clone] = [*found.values()]
        return found

    def cuGraphInstantiate(self, graph, flags):
        assert flags == 0
        self.executables[7000 + int(graph)] = list(self.graphs[int(graph)])
        return self.answer("instantiate", self.real.CUgraphExec(7000 + int(graph)))

    def cuGraphExecDestroy(self, executable):
        del self.executables[int(executable)]
        return self.answer("end")

    def cuGraphDestroy(self, graph):
        del self.graphs[int(graph)]
        return self.answer("end")


class TestPart(unittest.TestCase):
    def part(self, api, nodes):
        template = Template(1, tuple(EmptyNode(5 * i, handle) for i, handle in enumerate(nodes)), ())
        made, self.template = part_of(1, template, SimpleNamespace(device="cuda"), Driver(api, api))
        return made

    def test_clone_keeps_its_own_nodes_alone(self):
        api = Api()
        made = self.part(api, [12, 14])
        (kept,) = api.executables.values()
        self.assertEqual([n % 1000 for n in kept], [12, 14])
        self.assertEqual(api.graphs[1], [11, 12, 13, 14], "the graph stays as it was")
        self.assertEqual(made.raw_cuda_graph_exec(), *api.executables)

    def test_template_gets_the_handles_of_the_clone(self):
        made = self.part(Api(), [12, 14])
        handles = [n.handle for n in self.template.nodes]
        self.assertEqual(handles, [12 + 1000 * made.clone, 14 + 1000 * made.clone])
        self.assertEqual([n.index for n in self.template.nodes], [0, 5])

    def test_all_goes_with_the_part(self):
        api = Api()
        made = self.part(api, [11])
        made.reset()
        made.reset()
        self.assertEqual((list(api.graphs), api.executables), ([1], {}))
        del made

    def test_nothing_stays_of_one_that_could_not_be_made(self):
        for function in ("cut", "instantiate"):
            with self.subTest(function):
                api = Api(fail=function)
                with self.assertRaisesRegex(DriverError, "OUT_OF_MEMORY"):
                    self.part(api, [11])
                self.assertEqual(list(api.graphs), [1])
