# Owner(s): ["module: inductor"]

import dataclasses
from types import SimpleNamespace
from unittest import mock

from torch._inductor.cudagraph_relaunch import sizes as module
from torch._inductor.cudagraph_relaunch.arrange import Arrangement, Stage
from torch._inductor.cudagraph_relaunch.nodes import (
    CapturedGraph,
    EmptyNode,
    KernelNode,
    Template,
)
from torch._inductor.cudagraph_relaunch.outputs import Layout
from torch._inductor.cudagraph_relaunch.sizes import (
    DIFFERED,
    EAGER,
    FITTED,
    MOST,
    NoExecutable,
    OWN,
    SECONDS,
    Sizes,
)
from torch.testing._internal.common_utils import run_tests, TestCase


LAYOUT = Layout((), (), (), ())


class Launcher:
    """A launcher of an executable, which has a number; 0: it has none."""

    def __init__(self, shared, template):
        self.shared, self.template = shared, template

    @property
    def executable(self):
        return self.shared.number

    def like(self, template):
        return Launcher(self.shared, template)


class Device:
    """Makes executables of arrangements. `order`: in which kernels can be launched."""

    made, order = 0, None

    def instantiate(self, captured, arrangement, varies):
        assert isinstance(varies, CapturedGraph)  # what the executable is made of
        self.made += 1
        templates = [s.template for s in arrangement.stages] or [arrangement.template]
        shared = SimpleNamespace(number=self.made)
        return arrangement, [Launcher(shared, template) for template in templates]

    def order_of(self, captured, graph):
        return self.order

    def by_node(self, template, order):
        assert order is self.order
        return Launcher(SimpleNamespace(number=0), template)


def state(**fields):
    return SimpleNamespace(**{"relaunch": None, "spent": 0.0, "alone": False, **fields})


def clusters(*sizes):
    """A graph of kernels that are launched in clusters of these sizes."""
    launch = "mm", 7, 0, 0, (1, 1, 1), (32, 1, 1), 0, ()
    nodes = [KernelNode(i, 10 + i, *launch, bytes([n])) for i, n in enumerate(sizes)]
    return CapturedGraph(tuple(nodes), ((0, 1),), (), 0, 1)


def graph(nodes=2, **fields):
    nodes = tuple(EmptyNode(i, 10 + i) for i in range(nodes))
    return CapturedGraph(nodes, ((0, 1),), (), 0, 1, **fields)


class TestSizes(TestCase):
    def setUp(self):
        super().setUp()
        self.device, self.asked = Device(), []
        self.enterContext(mock.patch.object(module, "arrange", self.arrange))

    def arrange(self, proven, starts=()):
        """Arrange what is given as (template, nodes of each stage)."""
        self.asked.append(starts)
        template, parts = proven
        stages = tuple(
            Stage(tuple(nodes), LAYOUT, Template(0, (), (), (i,)), (), (), ())
            for i, nodes in enumerate(parts)
        )
        whole = Arrangement(LAYOUT, template)
        numbers = tuple(range(len(stages)))
        return Arrangement(LAYOUT, template, stages, numbers, whole=whole)

    def launchers(
        self, sizes, graph, template=None, stages=(), fixed=(), drawn=(), repeats=()
    ):
        captured = SimpleNamespace(recording=SimpleNamespace(fixed=fixed))
        captured.repeats = repeats
        template = template or Template(0, graph.nodes, ())
        proven = template, stages
        return sizes.launchers(self.device, captured, graph, proven, drawn)

    def test_first_sizes_have_their_own(self):
        sizes, new = Sizes(8), state()
        for count in range(OWN + 2):
            others = [*[state(relaunch="graph")] * count, state(), new]
            self.assertEqual(sizes.is_shared(new, others), count >= OWN)
        self.assertFalse(Sizes(0).is_shared(new, others))
        self.assertFalse(sizes.is_shared(state(alone=True), others))

    def test_its_own_graph_does_not_count(self):
        again = state(relaunch="graph")
        others = [state(relaunch="graph")] * (OWN - 1)
        self.assertFalse(Sizes(8).is_shared(again, [*others, again]))

    def test_graphs_that_fit(self):
        sizes = Sizes(8)
        arrangement, (first,) = self.launchers(sizes, graph())
        other = Template(0, graph().nodes, ("slots",))
        found, (second,) = self.launchers(sizes, graph(), other)
        self.assertEqual((first.executable, second.executable), (1, 1))
        self.assertEqual((second.template, found.template), (other, other))
        self.assertEqual((self.device.made, len(sizes.executables)), (1, 1))
        self.assertEqual(self.asked, [(), ()])
        self.assertTrue(sizes.keeps(first.shared))

    def test_graphs_that_do_not_fit(self):
        sizes = Sizes(8)
        for given, kwargs in (
            (graph(), {}),
            (graph(3), {}),
            (graph(partial=((0, 1),)), {}),
            (graph(), {"fixed": (0x10,)}),
            (graph(), {"drawn": (4,)}),
            (graph(), {"stages": [[0], [1]]}),
            (graph(), {"stages": [[0, 1], []]}),
        ):
            self.launchers(sizes, given, **kwargs)
        self.assertEqual((self.device.made, len(sizes.executables)), (7, 7))

    def given(self, sizes, *graphs, **kwargs):
        """The numbers of the executables that graphs get."""
        made = [self.launchers(sizes, each, **kwargs)[1] for each in graphs]
        return [launchers[0].executable for launchers in made]

    def test_graphs_that_differ_in_clusters(self):
        graphs = [clusters(n, 1) for n in range(1, 3 + MOST)]
        self.assertEqual(self.given(Sizes(8), *graphs), [*range(1, 3 + MOST)])

    def test_kernels_that_can_be_launched_one_by_one(self):
        sizes, self.device.order = Sizes(8), (0, 1)
        graphs = [clusters(n, 1) for n in range(1, 1 + MOST)]
        self.assertEqual(self.given(sizes, *graphs), [*range(1, 1 + MOST)])
        self.assertFalse(sizes.needs_none)
        # Further graphs do without an executable, whatever they differ in.
        others = clusters(9, 1), clusters(1, 1, 1), graph(partial=((0, 1),))
        self.assertEqual(self.given(sizes, *others), [0, 0, 0])
        self.assertTrue(sizes.needs_none)
        self.assertEqual(self.given(sizes, *graphs), [*range(1, 1 + MOST)])
        self.device.order = None
        self.assertEqual(self.given(sizes, *others[:1]), [1 + MOST])
        self.assertFalse(sizes.needs_none)
        made = MOST + 1
        self.assertEqual((sizes.instantiated, len(sizes.executables)), (made, made))
        few, self.device.order = Sizes(1), (0, 1)
        self.assertEqual(self.given(few, *graphs[:3]), [made + 1, 0, 0])

    def test_stages_without_an_executable(self):
        sizes, self.device.order = Sizes(1), (0, 1)
        self.launchers(sizes, graph(3))
        for starts in ((), (0, 1), (0, 1)):
            _, made = self.launchers(sizes, clusters(9, 1), stages=[[0], [1]])
            self.assertEqual([each.executable for each in made], [0, 0])
            # A graph of as many nodes is cut where the one before was.
            self.assertEqual(self.asked[-1], starts)
        self.launchers(sizes, graph(4))
        self.assertEqual(self.asked[-1], ())

    def test_stages(self):
        sizes = Sizes(8)
        _, made = self.launchers(sizes, graph(), stages=[[0], [1]])
        arrangement, again = self.launchers(sizes, graph(), stages=[[0], [1]])
        self.assertEqual([each.executable for each in (*made, *again)], [1] * 4)
        templates = [stage.template for stage in arrangement.stages]
        self.assertEqual([each.template for each in again], templates)
        self.assertEqual(self.asked[-1], (0, 1))  # it is cut where the other was

    def test_latest_used_are_kept(self):
        sizes = Sizes(2)
        first = self.launchers(sizes, graph())[1][0].shared
        second = self.launchers(sizes, graph(3))[1][0].shared
        self.launchers(sizes, graph())  # it is used again
        third = self.launchers(sizes, graph(4))[1][0].shared
        kept = [sizes.keeps(shared) for shared in (first, second, third)]
        self.assertEqual(kept, [True, False, True])

    def test_calls_were_left_out(self):
        """There is no graph of the driver's that could be instantiated."""
        sizes, left_out = Sizes(2), {"repeats": ["a call"]}
        with self.assertRaisesRegex(NoExecutable, "has these nodes"):
            self.launchers(sizes, graph(), **left_out)
        self.launchers(sizes, graph())
        _, (made,) = self.launchers(sizes, graph(), **left_out)
        self.assertEqual((made.executable, sizes.fitted), (1, 1))
        self.device.order = 0, 1
        for other in (graph(3), graph(partial=((0, 1),))):
            with self.assertRaises(NoExecutable):
                self.launchers(sizes, other, **left_out)
        self.launchers(sizes, graph(3))
        self.assertEqual(self.given(sizes, graph(4), **left_out), [0])
        self.assertEqual((self.device.made, len(sizes.executables)), (2, 2))

    def test_calls_may_be_left_out(self):
        """If the next graph will hardly have to be instantiated."""
        sizes = Sizes(2)
        for _ in range(1 + FITTED):
            self.assertFalse(sizes.may_leave_out())
            self.launchers(sizes, graph())
        self.assertTrue(sizes.may_leave_out())
        self.launchers(sizes, graph(3))  # it is instantiated
        self.assertFalse(sizes.may_leave_out())
        self.device.order = 0, 1
        self.launchers(sizes, graph(4))  # it needs no executable
        self.assertTrue(sizes.may_leave_out())

    def test_captures_from_which_no_call_can_be_left_out(self):
        sizes = Sizes(8)
        sizes.needs_none = True
        for worked in (False,) * (DIFFERED - 1) + (True,) + (False,) * DIFFERED:
            self.assertTrue(sizes.may_leave_out())
            sizes.note_left_out(worked)
        self.assertFalse(sizes.may_leave_out())

    def test_numbers_of_nodes(self):
        """Those of an executable that can be set to the nodes, which are in order."""
        sizes, two = Sizes(8), clusters(1, 2)
        self.assertEqual(sizes.numbers_of(two.nodes), ())
        self.launchers(sizes, dataclasses.replace(two, edges=((1, 0),)))
        self.launchers(sizes, graph(3))  # node 2 may run beside the others
        self.assertEqual(sizes.numbers_of(two.nodes[::-1]), (1, 0))
        for others in (two.nodes, graph(2).nodes, two.nodes[:1], graph(3).nodes):
            self.assertEqual(sizes.numbers_of(others), ())
        self.launchers(sizes, clusters(2, 1))
        self.assertEqual(sizes.numbers_of(two.nodes[::-1]), (0, 1))  # the latest

    def test_sizes_that_wait_for_a_capture(self):
        sizes, new = Sizes(8), state(spent=0.2)
        many = [*[state(relaunch="graph")] * OWN, new]
        for _ in range(EAGER):
            self.assertFalse(sizes.waits(new, many))
            sizes.note_capture(0.5)
        self.assertGreater(sizes.captures_took, SECONDS)
        self.assertTrue(sizes.waits(new, many))
        self.assertFalse(sizes.waits(new, many[1:]))  # it gets an executable of its own
        new.spent = 0.5
        self.assertFalse(sizes.waits(new, many))

    def test_captures_that_take_little(self):
        sizes, new = Sizes(8), state()
        many = [*[state(relaunch="graph")] * OWN, new]
        for _ in range(2 * EAGER):
            sizes.note_capture(SECONDS / (4 * EAGER))
        self.assertFalse(sizes.waits(new, many))
        for _ in range(2 * EAGER):
            sizes.note_capture(SECONDS / (2 * EAGER))
        self.assertTrue(sizes.waits(new, many))


if __name__ == "__main__":
    run_tests()
