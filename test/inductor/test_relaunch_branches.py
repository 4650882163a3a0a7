"""The branches of a captured graph, moved into conditional nodes, over a graph in Python."""

import contextlib
import functools
import itertools
import unittest
import unittest.mock
from types import SimpleNamespace

import torch
from hypothesis import given, settings, strategies as st

import form  # noqa: F401
from stand_ins.captured_words import u64
from stand_ins.graph_api import FakeApi
from torch_overlay._inductor.relaunch.graph import driver as cu, fill_copy_kernels, read
from torch_overlay._inductor.relaunch.graph.conditional_nodes import find_setter, nested, Setter
from torch_overlay._inductor.relaunch.proof.nodes import Conditional, Template, Unprovable


GRAPH, SET, WORK = 0x77, 0x5E7, 0x30
PREDICATE = 0xBEEF00


class Captured:
    """A captured graph: a chain of kernels, with conditionals."""

    def __init__(self, handle=1):
        self.api = FakeApi()
        self.driver = cu.Driver(self.api, self.api)
        self.api.declare(SET, "set", 8, 8)
        self.api.declare(WORK, "work", 8)
        self.setter = Setter(cu.KernelLaunch(SET, (1, 1, 1), (1, 1, 1), 0, ()), handle)
        self.order, self.conditionals = [], []

    def work(self):
        self.order.append(self.api.kernel(WORK, u64(len(self.order)), after=self.order[-1:]))
        return self.order[-1]

    def choice(self, *branches):
        """Capture a condition; each branch is captured by a function."""
        values = self.setter.of(PREDICATE).arguments
        self.order.append(setter := self.api.kernel(SET, *values, after=self.order[-1:], grid=(1, 1, 1)))
        at, bodies = len(self.conditionals), []
        for capture in branches:
            first = len(self.order)
            capture()
            bodies.append(frozenset(self.order[first:]))
        self.conditionals.insert(at, Conditional(setter, tuple(bodies)))
        return setter

    def nested(self):
        graph = read.read(GRAPH, (), 0, 1 << 20, driver=self.driver, conditionals=self.conditionals)
        before = Template(1, graph.nodes, (), conditionals=graph.conditionals)
        self.template = nested(self.driver, GRAPH, before, self.setter)
        self.now = dict(zip(self.order, [node.handle for node in self.template.nodes], strict=True))
        return self.template

    def nodes(self, graph):
        return self.driver.structure(graph).nodes

    def edges(self, graph):
        return {(u, v) for u, v, _ in self.driver.structure(graph).edges}

    def conditional_nodes(self, graph):
        structure = self.driver.structure(graph)
        return [node for node, kind in zip(structure.nodes, structure.kinds) if kind == cu.CONDITIONAL]


def nothing():
    pass


class TestNested(unittest.TestCase):
    def test_edges_around_a_branch_are_those_of_its_node(self):
        made = Captured()
        before = made.work()
        setter = made.choice(lambda: (made.work(), made.work()), made.work)
        after = made.work()
        first, second, third = made.order[2:5]
        made.nested()
        (chooser,) = made.conditional_nodes(GRAPH)
        new = made.now
        self.assertEqual(made.edges(GRAPH), {(before, new[setter]), (new[setter], chooser), (chooser, after)})
        self.assertEqual(made.nodes(chooser + 1), [new[first], new[second]])
        self.assertEqual(made.edges(chooser + 1), {(new[first], new[second])})
        self.assertEqual((made.nodes(chooser + 2), made.edges(chooser + 2)), ([new[third]], set()))
        self.assertEqual((new[before], new[after]), (before, after), "nodes around it stay")

    def test_nodes_in_a_branch_are_what_they_were(self):
        made = Captured()
        made.choice(made.work, made.work)
        before = read.read(GRAPH, (), 0, 1 << 20, driver=made.driver).nodes
        for old, node in zip(before, made.nested().nodes):
            if old.func == WORK:
                (kernel,) = made.driver.kernels([node.handle])
                self.assertEqual(kernel[-1], old.parameters)
                self.assertEqual((node.parameters, kernel[3]), (old.parameters, old.grid))
                self.assertEqual(made.api.attributes[node.handle], old.handle)

    def test_setter_gets_the_handle_of_its_condition(self):
        for position in (0, 1):
            made = Captured(handle=position)
            made.choice(made.work, made.work)
            node = made.nested().nodes[0]
            handles = [each for each in made.api.home if each not in made.api.kind]
            values = [int.from_bytes(value, "little") for _, value in node.parameters]
            self.assertEqual(values[position], handles[0])
            self.assertEqual(values[1 - position], PREDICATE)
            self.assertEqual(made.driver.kernels([node.handle])[0][-1], node.parameters, "in the graph, too")

    def test_condition_in_a_branch(self):
        made = Captured()
        inner = []
        made.choice(lambda: (made.work(), inner.append(made.choice(made.work, nothing)), made.work()), made.work)
        made.nested()
        (outer,) = made.conditional_nodes(GRAPH)
        (chooser,) = made.conditional_nodes(outer + 1)
        first, setter, deep, last, other = (made.now[node] for node in made.order[1:])
        self.assertEqual(made.edges(outer + 1), {(first, setter), (setter, chooser), (chooser, last)})
        self.assertEqual((made.nodes(chooser + 1), made.nodes(chooser + 2)), ([deep], []))
        self.assertEqual(made.nodes(outer + 2), [other])

    def test_empty_branches_come_after_the_setter(self):
        made = Captured()
        setter = made.choice(nothing, nothing)
        made.work()
        made.nested()
        (chooser,) = made.conditional_nodes(GRAPH)
        self.assertIn((made.now[setter], chooser), made.edges(GRAPH))

    def test_programmatic_edges_become_plain(self):
        made = Captured()
        made.choice(lambda: (made.work(), made.work()), nothing)
        after = made.work()
        made.api.edge_list = [(u, v, "programmatic") for u, v, _ in made.api.edge_list]
        first, second = made.order[1:3]
        made.nested()
        (chooser,) = made.conditional_nodes(GRAPH)
        kinds = {(u, v): kind for u, v, kind in made.api.edge_list}
        self.assertEqual(kinds[made.now[first], made.now[second]], "plain")
        self.assertEqual(kinds[chooser, after], "plain")

    @settings(max_examples=100, deadline=None)
    @given(st.recursive(st.just(None), lambda inner: st.tuples(*[st.lists(inner, max_size=3)] * 2), max_leaves=8))
    def test_order_stays(self, drawn):
        """Each node comes after the same nodes as before, but for those of the other branch."""
        made, place = Captured(), {}

        def capture(items, path):
            for item in items:
                if item is None:
                    place[made.work()] = path
                    continue
                at = len(made.order)
                made.choice(*[functools.partial(capture, item[b], (*path, (at, b))) for b in range(2)])
                place[made.order[at]] = path

        capture([None, drawn, None], ())
        made.nested()
        after = dict.fromkeys(made.api.kind, ()) | {u: [] for u in made.api.kind}
        for u, v, _ in made.api.edge_list:
            after[u].append(v)
        inside = {node: [] for node in made.api.kind}  # conditional node -> what is in its graphs
        for node, graph in made.api.home.items():
            owner = graph & ~0xF
            if node in made.api.kind and graph != GRAPH:
                inside[owner].append(node)

        def contents(node):
            return {node}.union(*map(contents, inside[node]))

        def reached(node):
            """Nodes that edges order after this one: those of its own graph, and of the graphs around it."""
            found, waiting = set(), list(after[node])
            while waiting:
                each = waiting.pop()
                if each not in found:
                    found.add(each)
                    waiting += after[each]
            found = set().union(*map(contents, found))
            home = made.api.home.get(node, GRAPH)
            return found if home == GRAPH else found | reached(home & ~0xF)

        for u, v in itertools.combinations(made.order, 2):
            common = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(place[u], place[v])))
            split = [path[len(common)][0] for path in (place[u], place[v]) if len(path) > len(common)]
            is_apart = len(split) == 2 and split[0] == split[1]
            self.assertEqual(made.now[v] in reached(made.now[u]), not is_apart)


class TestSetter(unittest.TestCase):
    """The kernel that sets a condition is found in a capture of torch's own."""

    def find(self, *order, sizes=(8, 8), fail=None, func=SET):
        made, test = Captured(), self

        class Graph:
            def __init__(self, keep_graph):
                test.assertTrue(keep_graph)
                self.calls = test.calls = []

            def begin_capture_to_if_node(self, predicate):
                self.calls.append("if")
                if fail is not None:
                    raise fail
                made.api.declare(func, "set", *sizes)
                values = {"handle": 5, "predicate": predicate.data_ptr(), "count": 1}
                node = made.api.kernel(
                    func, *(values[name].to_bytes(size, "little") for name, size in zip(order, sizes))
                )
                if func != SET:
                    made.api.params[node].func, made.api.params[node].kern = 0, func
                    made.api.functions[0] = made.api.functions[func]
                made.api.new(cu.CONDITIONAL, after=[node])

            def raw_cuda_graph(self):
                return GRAPH

            def __getattr__(self, name):
                return lambda **given: self.calls.append(name)

        with (
            unittest.mock.patch.object(torch.cuda, "CUDAGraph", Graph),
            unittest.mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
        ):
            return made, find_setter(SimpleNamespace(device="cpu"), made.driver)

    def test_order_of_its_parameters_is_found(self):
        for order in (("handle", "predicate"), ("predicate", "handle")):
            made, setter = self.find(*order)
            values = dict(zip(order, setter.of(PREDICATE).arguments))
            self.assertEqual(values, {"handle": bytes(8), "predicate": u64(PREDICATE)})
            self.assertEqual((setter.launch.func, setter.launch.grid), (SET, (2, 3, 4)))
            self.assertEqual(self.calls[-1], "reset")
            made.driver.launch_kernel(setter.of(PREDICATE), 0x99)
            launched = (SET, [2, 3, 4, 32, 2, 1, 48], 0x99, list(setter.of(PREDICATE).arguments))
            self.assertEqual(made.api.launched, [launched])

    def test_kernel_without_a_function_of_this_context(self):
        _, setter = self.find("handle", "predicate", func=0x4E)
        self.assertEqual(setter.launch.func, 0x4F)

    def test_torch_or_a_driver_without_conditional_nodes(self):
        other = self.find, ("handle", "predicate", "count"), {"sizes": (8, 8, 4)}
        for find, order, options in (
            (self.find, ("handle", "predicate"), {"fail": RuntimeError("not supported")}),
            (self.find, ("handle", "predicate"), {"fail": AttributeError("begin_capture_to_if_node")}),
            other,
        ):
            with self.subTest(options), self.assertRaisesRegex(Unprovable, "can't choose between branches") as context:
                find(*order, **options)
            self.assertEqual(context.exception.reason, "condition")
            self.assertEqual(self.calls[-2:], ["capture_end", "reset"])


class TestRead(unittest.TestCase):
    def test_copy_in_a_branch_is_refused(self):
        made = Captured()
        copy = made.api.memcpy(0x1000, 0x2000, 16)
        made.conditionals = [Conditional(made.work(), (frozenset([copy]), frozenset()))]
        with self.assertRaisesRegex(Unprovable, "a branch has work that is no kernel") as context:
            made.nested()
        self.assertEqual(context.exception.reason, "condition")

    def test_fill_in_a_branch_becomes_a_kernel_of_the_branch(self):
        made = Captured()
        fill, replaced = made.api.memset(0x1000), {}
        launch = cu.KernelLaunch(WORK, (1, 1, 1), (1, 1, 1), 0, (u64(1),))
        with unittest.mock.patch.object(fill_copy_kernels, "fill", lambda *given: launch):
            self.assertEqual(read.tidy(GRAPH, driver=made.driver, made=replaced), [])
        self.assertEqual(list(replaced), [fill])
        self.assertIn(replaced[fill], made.nodes(GRAPH))
