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
    ALIKE,
    DIFFERED,
    EAGER,
    FITTED,
    NoExecutable,
    OWN,
    SECONDS,
    Sizes,
)
from torch.testing._internal.common_utils import run_tests, TestCase


LAYOUT = Layout((), (), (), ())


class Launcher:
    """A launcher of an executable, which has a number."""

    def __init__(self, shared, template, apart=False):
        self.shared, self.template, self.apart = shared, template, apart

    @property
    def executable(self):
        return self.shared.number

    def like(self, template, apart):
        return Launcher(self.shared, template, apart)


class Device:
    """Makes executables of arrangements. `order`: what `Shared.launches` is."""

    made, order = 0, ()

    def instantiate(self, captured, arrangement, varies):
        assert isinstance(varies, CapturedGraph)  # what the executable is made of
        self.made += 1
        templates = [s.template for s in arrangement.stages] or [arrangement.template]
        shared = SimpleNamespace(number=self.made, launches=self.order)
        return arrangement, [Launcher(shared, template) for template in templates]


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

    def given(self, sizes, *clusters_of, **kwargs):
        """What graphs get: the number of their executable, and are they apart?"""
        made = [
            self.launchers(sizes, clusters(*each), **kwargs)[1] for each in clusters_of
        ]
        return [(each[0].executable, each[0].apart) for each in made]

    def test_graphs_that_differ_in_clusters(self):
        sizes = Sizes(8)
        few = [(n, 1) for n in range(1, 1 + ALIKE)]
        self.assertEqual(
            self.given(sizes, *few), [(n, False) for n in range(1, 1 + ALIKE)]
        )
        # The fifth combination, and further ones, use the latest executable.
        self.assertEqual(self.given(sizes, (9, 1), (1, 9)), [(ALIKE, True)] * 2)
        self.assertEqual(self.given(sizes, few[0], (9, 1)), [(1, False), (1, True)])
        self.assertEqual((self.device.made, sizes.instantiated), (ALIKE, ALIKE))
        # Another shape has as many.
        self.assertEqual(self.given(sizes, (9, 1, 1)), [(1 + ALIKE, False)])

    def test_clusters_of_kernels_that_may_run_side_by_side(self):
        self.device.order = None
        wanted = [(n, False) for n in range(1, 3 + ALIKE)]
        many = [(n, 1) for n in range(1, 3 + ALIKE)]
        self.assertEqual(self.given(Sizes(8), *many), wanted)

    def test_stages_with_other_clusters(self):
        sizes, cut = Sizes(8), {"stages": [[0], [1]]}
        self.given(sizes, *[(n, 1) for n in range(1, 1 + ALIKE)], **cut)
        _, made = self.launchers(sizes, clusters(9, 1), **cut)
        self.assertEqual([each.apart for each in made], [True, True])
        # Stages that no executable has are instantiated, whatever their clusters.
        _, made = self.launchers(sizes, clusters(9, 1))
        self.assertEqual([each.apart for each in made], [False])
        self.assertEqual(self.device.made, 1 + ALIKE)

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
        sizes, left_out = Sizes(8), {"repeats": ["a call"]}
        with self.assertRaisesRegex(NoExecutable, "has these nodes"):
            self.launchers(sizes, graph(), **left_out)
        self.launchers(sizes, graph())
        _, (made,) = self.launchers(sizes, graph(), **left_out)
        self.assertEqual((made.executable, sizes.fitted), (1, 1))
        # Workspaces live longer then, so that stages may seem to pay.
        cut = {"stages": [[0], [1]]}
        found, made = self.launchers(sizes, graph(), **cut, **left_out)
        self.assertEqual((found.stages, len(made), sizes.fitted), ((), 1, 2))
        self.launchers(sizes, graph(), **cut)
        self.assertEqual((self.device.made, sizes.fitted), (2, 0))
        _, made = self.launchers(sizes, graph(), **cut, **left_out)
        self.assertEqual([each.executable for each in made], [2, 2])
        for other in (graph(3), graph(partial=((0, 1),))):
            with self.assertRaises(NoExecutable):
                self.launchers(sizes, other, **left_out)
        self.assertEqual((self.device.made, len(sizes.executables)), (2, 2))

    def test_order_for_a_graph_that_will_hardly_need_an_executable(self):
        sizes, order = Sizes(8), clusters(1, 1)
        order = dataclasses.replace(order, edges=((1, 0),))
        self.assertEqual(sizes.stream_order(), ())
        for _ in range(1 + FITTED):
            self.assertEqual(sizes.stream_order(), ())
            self.launchers(sizes, order)
        self.assertEqual(sizes.stream_order(), (1, 0))
        self.launchers(sizes, graph(3))  # it is instantiated
        self.assertEqual(sizes.stream_order(), ())
        self.launchers(sizes, order)
        self.assertEqual(sizes.stream_order(), ())
        self.launchers(sizes, order)
        self.assertEqual(sizes.stream_order(), (1, 0))
        for _ in range(1 + FITTED):
            self.launchers(sizes, graph(3))
        self.assertEqual(sizes.stream_order(), ())  # node 2 may run beside the others

    def test_order_for_any_clusters(self):
        for order, wanted in (((), (0, 1)), (None, ())):
            sizes, self.device.order = Sizes(8), order
            for n in range(ALIKE):
                self.assertEqual(sizes.stream_order(), ())
                self.launchers(sizes, clusters(1 + n, 1))
            self.assertEqual(sizes.stream_order(), wanted)

    def test_captures_from_which_no_call_can_be_left_out(self):
        sizes = Sizes(8)
        for _ in range(1 + FITTED):
            self.launchers(sizes, graph())
        for _ in range(DIFFERED):
            self.assertEqual(sizes.stream_order(), (0, 1))
            sizes.note_differs()
        self.assertEqual(sizes.stream_order(), ())

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
