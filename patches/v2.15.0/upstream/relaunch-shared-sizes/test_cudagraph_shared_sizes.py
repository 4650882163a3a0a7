# Owner(s): ["module: inductor"]

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
from torch._inductor.cudagraph_relaunch.order import only_order
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
    """A launcher of an executable, which has a number."""

    def __init__(self, shared, template):
        self.shared, self.template = shared, template

    @property
    def executable(self):
        return self.shared.number

    def like(self, template):
        return Launcher(self.shared, template)


class ByNode:
    """What launches kernels in an order; there is no executable."""

    executable = shared = None

    def __init__(self, template, order):
        self.template, self.order = template, order


class Device:
    """Makes executables of arrangements. `launches`: kernels can be launched one by
    one."""

    made, launches, by_node = 0, True, ByNode

    def instantiate(self, captured, arrangement, varies):
        assert isinstance(varies, CapturedGraph)  # what the executable is made of
        self.made += 1
        templates = [s.template for s in arrangement.stages] or [arrangement.template]
        shared = SimpleNamespace(number=self.made)
        return arrangement, [Launcher(shared, template) for template in templates]

    def order_of(self, captured, graph):
        assert captured.recording.fixed is not None
        return only_order(len(graph.nodes), graph.edges) if self.launches else None


def state(**fields):
    return SimpleNamespace(**{"relaunch": None, "spent": 0.0, "alone": False, **fields})


def clusters(*sizes, step=1):
    """A graph of kernels that are launched in clusters of these sizes, one after
    another; the last one comes first if `step` is -1."""
    launch = "mm", 7, 0, 0, (1, 1, 1), (32, 1, 1), 0, ()
    nodes = [KernelNode(i, 10 + i, *launch, bytes([n])) for i, n in enumerate(sizes)]
    order = range(len(sizes))[::step]
    return CapturedGraph(tuple(nodes), tuple(zip(order, order[1:])), (), 0, 1)


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
        cuts = tuple([10 * i for i in range(len(stages))])
        return Arrangement(LAYOUT, template, stages, cuts, whole=whole)

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
        sizes, self.device.launches = Sizes(8), False
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

    def given(self, sizes, *clusters_of, **kwargs):
        """The executables that graphs get; None for those that have none."""
        made = [
            self.launchers(sizes, clusters(*each), **kwargs)[1] for each in clusters_of
        ]
        return [each[0].executable for each in made]

    def test_graphs_that_fit_none_of_four(self):
        """They differ in clusters, and in the number of nodes."""
        sizes, few = Sizes(8), [(n,) * n for n in range(1, 1 + MOST)]
        numbers = list(range(1, 1 + MOST))
        self.assertEqual(self.given(sizes, *few), numbers)
        others = [(9,), (9, 1), (1,) * 9]
        self.assertEqual(self.given(sizes, *others, *others), [None] * 6)
        self.assertEqual(self.given(sizes, *few), numbers)
        self.assertEqual((self.device.made, sizes.instantiated), (MOST, MOST))
        self.assertEqual(len(sizes.executables), MOST)
        template = Template(0, (), ("slots",))
        last_first = clusters(1, 9, 9, step=-1)
        arrangement, (made,) = self.launchers(sizes, last_first, template)
        self.assertEqual((made.template, made.order), (template, (2, 1, 0)))
        self.assertIs(arrangement.template, template)

    def test_fewer_executables_are_allowed(self):
        sizes = Sizes(2)
        self.assertEqual(self.given(sizes, (1,), (2,), (3,), (1,)), [1, 2, None, 1])

    def test_kernels_that_can_not_be_launched_one_by_one(self):
        sizes, self.device.launches = Sizes(8), False
        many = [(n, 1) for n in range(1, 3 + MOST)]
        self.assertEqual(self.given(sizes, *many), [n for n, _ in many])
        side_by_side = graph(3)
        self.device.launches = True
        _, (made,) = self.launchers(sizes, side_by_side)
        self.assertEqual(made.executable, 3 + MOST)

    def test_stages_without_an_executable(self):
        sizes, cut = Sizes(8), {"stages": [[0], [1]]}
        self.given(sizes, *[(n, 1) for n in range(1, 1 + MOST)], **cut)
        arrangement, made = self.launchers(sizes, clusters(9, 1), **cut)
        self.assertEqual([each.executable for each in made], [None, None])
        templates = [stage.template for stage in arrangement.stages]
        self.assertEqual([each.template for each in made], templates)
        self.assertEqual([each.order for each in made], [(0, 1)] * 2)
        self.assertEqual(self.asked[-1], ())
        # A graph with as many nodes is cut where that one was.
        self.launchers(sizes, clusters(8, 1), **cut)
        self.assertEqual(self.asked[-1], (0, 10))
        self.launchers(sizes, clusters(1, 1, 1), stages=[[0], [1], [2]])
        self.assertEqual(self.asked[-1], ())
        for nodes, starts in ((3, (0, 10, 20)), (2, (0, 10))):
            self.launchers(sizes, clusters(*[7] * nodes))
            self.assertEqual(self.asked[-1], starts)
        # The latest ones of three nodes, and of two, were not cut.
        for nodes in (3, 2):
            self.launchers(sizes, clusters(*[8] * nodes))
            self.assertEqual(self.asked[-1], ())

    def test_graph_that_can_not_be_cut(self):
        """The driver refuses, so the graph is launched as a whole."""

        def instantiate(captured, arrangement, varies):
            return Device.instantiate(self.device, captured, arrangement.whole, varies)

        sizes, cut = Sizes(8), {"stages": [[0], [1]]}
        with mock.patch.object(self.device, "instantiate", instantiate):
            self.launchers(sizes, graph(), **cut)
        found, (made,) = self.launchers(sizes, graph(), **cut)
        self.assertEqual((found.stages, made.executable), ((), 1))

    def test_stages(self):
        sizes = Sizes(8)
        _, made = self.launchers(sizes, graph(), stages=[[0], [1]])
        arrangement, again = self.launchers(sizes, graph(), stages=[[0], [1]])
        self.assertEqual([each.executable for each in (*made, *again)], [1] * 4)
        templates = [stage.template for stage in arrangement.stages]
        self.assertEqual([each.template for each in again], templates)
        self.assertEqual(self.asked[-1], (0, 10))  # it is cut where the other was

    def test_latest_used_are_kept(self):
        sizes, self.device.launches = Sizes(2), False
        first = self.launchers(sizes, graph())[1][0].shared
        second = self.launchers(sizes, graph(3))[1][0].shared
        self.launchers(sizes, graph())  # it is used again
        third = self.launchers(sizes, graph(4))[1][0].shared
        kept = [sizes.keeps(shared) for shared in (first, second, third)]
        self.assertEqual(kept, [True, False, True])

    def test_calls_were_left_out(self):
        """There is no graph of the driver's that could be instantiated."""
        sizes, left_out = Sizes(8), {"repeats": ["a call"]}
        with self.assertRaisesRegex(NoExecutable, "has these nodes"):
            self.launchers(sizes, graph(), **left_out)
        self.launchers(sizes, graph())
        _, (made,) = self.launchers(sizes, graph(), **left_out)
        self.assertEqual((made.executable, sizes.fitted), (1, 1))
        for other, fields in (
            (graph(3), {}),
            (graph(partial=((0, 1),)), {}),
            (graph(), {"stages": [[0], [1]]}),
        ):
            with self.assertRaises(NoExecutable):
                self.launchers(sizes, other, **fields, **left_out)
        self.assertEqual((self.device.made, len(sizes.executables)), (1, 1))
        for n in range(1, MOST):
            self.launchers(sizes, clusters(n, 1))
        _, (made,) = self.launchers(sizes, clusters(9, 1), **left_out)
        self.assertIsNone(made.executable)
        with self.assertRaises(NoExecutable):  # its nodes may run side by side
            self.launchers(sizes, graph(3), **left_out)
        self.assertEqual(self.device.made, MOST)

    def test_graphs_that_will_hardly_need_an_executable(self):
        """So calls may be left out."""
        sizes = Sizes(8)
        for nodes in (2, 3):
            for _ in range(1 + FITTED):
                self.assertFalse(sizes.may_leave_out())
                self.launchers(sizes, graph(nodes))
            self.assertTrue(sizes.may_leave_out())
            self.launchers(sizes, clusters(nodes))  # it is instantiated
        self.assertFalse(sizes.may_leave_out())
        self.launchers(sizes, clusters(9))
        self.assertTrue(sizes.may_leave_out())  # the next one will need none, either
        self.launchers(sizes, graph())
        self.assertTrue(sizes.may_leave_out())
        self.launchers(sizes, graph(4))  # but one that may run side by side does
        self.assertFalse(sizes.may_leave_out())

    def test_captures_from_which_no_call_can_be_left_out(self):
        sizes = Sizes(8)
        for _ in range(1 + FITTED):
            self.launchers(sizes, graph())
        for worked in (*[False] * (DIFFERED - 1), True, *[False] * DIFFERED):
            self.assertTrue(sizes.may_leave_out())
            sizes.note_left_out(worked)
        self.assertFalse(sizes.may_leave_out())

    def test_numbers_of_nodes(self):
        """They are those of an executable with as many nodes that run in one order."""
        sizes = Sizes(8)
        self.launchers(sizes, clusters(1, 1, 1, step=-1))
        self.launchers(sizes, graph(3))
        self.launchers(sizes, clusters(1, 1))
        wanted = [(3, [2, 1, 0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (1, [0])]
        found = [(count, [*sizes.numbers_of(count)]) for count, _ in wanted]
        self.assertEqual(found, wanted)
        self.launchers(sizes, clusters(1, 1, step=-1))  # the latest one counts
        self.assertEqual(sizes.numbers_of(2), (1, 0))
        self.launchers(sizes, clusters(1, 1))
        self.assertEqual(sizes.numbers_of(2), (0, 1))

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
