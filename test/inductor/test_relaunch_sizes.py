"""Tests of sizes that share executables: what a new size changes is learned by one capture, and patched."""

import dataclasses
import gc
import threading
from unittest import mock

import torch

import form  # noqa: F401
from stand_ins import relaunch_device, relaunch_driver
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay import config
from torch_overlay._inductor.relaunch import governor, region_graphs, runners
from torch_overlay._inductor.relaunch.governor import Governor
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.launch.staged import launches_of
from torch_overlay._inductor.relaunch.proof.functions import Functions
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, FillNode, KernelNode, Segment
from torch_overlay._inductor.relaunch.proof.prove import prove
from torch_overlay._inductor.relaunch.sizes import sizes


AFFORDS_CAPTURE = Governor.affords_capture  # the stand-in device has another
SIZED = region(
    "x, w, n",
    "a = torch.mm(x, w, out=new(n, 4))",
    "b = torch.sin(a, out=new(n, 4))",
    "del a",
    "c = torch.mul(b, b, out=new(n, 4))",
    "return (c, b[n // 2:], n)",
)


# The number of nodes differs, too.
BRANCHED = SIZED.replace("    return", "    for _ in range(n % 5):\n        c.add_(0)\n    return")


# A backward whose saved tensors die in turn.
SAVED = """
def region(args):
    *saved, n = args
    args.clear()
    made = []
    while saved:
        x = saved.pop()
        out = empty_strided_cuda((n,), (1,), torch.float64)
        torch.mul(x, x, out=out)
        del x
        made.append(out)
    return tuple(made)
"""


def expected(x, w, n):
    b = torch.sin(x @ w)
    return b * b, b[n // 2 :], n


class SizesTestCase(RelaunchTestCase):
    """Sizes share executables from the second one on."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(sizes, "OWN", 1))

    def sized(self, source=SIZED, **options):
        run = self.runner(source, **options)
        self.w = torch.randn(4, 4)
        return run

    def backward(self, *sizes, run=None):
        """A runner of SAVED, called with these sizes."""
        run = run or self.runner(SAVED, is_backward=True)
        for n in sizes:
            made = run([*[torch.full((n,), float(k), dtype=torch.float64) for k in range(6)], n])
            want = [torch.full((n,), float(k * k), dtype=torch.float64) for k in reversed(range(6))]
            self.assertEqual(list(made), want)
        return run

    def call(self, run, n):
        x = torch.randn(n, 4)
        got = run([x, self.w, n])
        for have, want in zip(got, expected(x, self.w, n), strict=True):
            self.assertEqual(have, want, f"size {n}")

    def executables(self, run):
        """How many there are for the sizes that have a graph."""
        made = [state for state in run.states.values() if state.relaunch is not None]
        return len({id(state.shared) if state.shared is not None else id(state) for state in made})

    def captures(self):
        return len(self.device.random)


class TestSizes(SizesTestCase):
    def test_sizes_share_one_executable_beyond_the_first(self):
        run = self.sized()
        for n in (3, 3, 3, *range(4, 20), *range(19, 3, -1), 5, 9, 3, 3, 7, 7, 3):
            self.call(run, n)
        self.assertEqual(len(self.device.launchers), 2)
        self.assertEqual((self.counted("captures"), self.captures()), (17, 2 + 16), "one capture for each further size")
        self.assertEqual(self.executables(run), 2)

    def test_the_first_few_sizes_have_executables_of_their_own(self):
        run = self.sized()
        with mock.patch.object(sizes, "OWN", 4):
            for n in (3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 3, 5, 7, 9):
                self.call(run, n)
        self.assertEqual((len(self.device.launchers), self.executables(run)), (5, 5))

    def test_a_new_size_is_not_observed(self):
        run = self.sized()
        for n in (3, 3, 4):
            self.call(run, n)
        self.assertEqual(run.states[(4,)].plan, dataclasses.replace(run.states[(3,)].plan, asked={}))

    def test_more_sizes_are_kept_than_executables(self):
        with config.patch(cudagraph_templates=2):
            run = self.sized()
        for n in range(2, 40):
            self.call(run, n)
            self.call(run, n)
        self.assertEqual(len(run.states), 8)
        self.assertEqual(len(self.device.launchers), 2)

    def test_without_sharing_each_size_has_its_own(self):
        with config.patch(cudagraph_executables=0):
            run = self.sized()
        for n in (3, 3, 4, 4, 5, 5, 3, 4):
            self.call(run, n)
        self.assertEqual(len(self.device.launchers), 3)

    def test_a_graph_with_other_nodes_has_another_executable(self):
        run = self.sized(BRANCHED)
        for n in (5, 5, 10, 10, 6, 6, 11, 11, 15, 15, 6, 11, 10, 5, 16, 16):
            self.call(run, n)
        self.assertEqual(len(self.device.launchers), 3, "the first size; sizes that are 0, and 1, modulo 5")

    def test_the_executable_that_was_not_chosen_for_longest_goes(self):
        self.device.order_of = lambda captured, graph: None  # so each shape needs one
        with config.patch(cudagraph_executables=2):
            run = self.sized(BRANCHED)
        for n in (3, 3, 5, 5, 6, 6, 10, 10, 7, 7):  # three shared ones: n % 5 in 0, 1, 2
            self.call(run, n)
        self.assertEqual(len(run.states.sizes.executables), 2)
        kept = {key[0] for key, state in run.states.items() if state.relaunch is not None}
        self.assertEqual(kept, {3, 5, 10, 7})
        self.assertEqual(self.executables(run), 3)
        for n in (6, 6, 5, 7, 3, 10):
            self.call(run, n)

    def test_executables_that_replace_others_are_counted(self):
        self.device.order_of = lambda captured, graph: None
        with config.patch(cudagraph_executables=1, cudagraph_templates=2):
            run = self.sized(BRANCHED)
        for n in (3, 5, 10, 6, 7, 8, 11, 12, 13):
            self.call(run, n)
            self.call(run, n)
        self.assertEqual((len(self.device.launchers), run.states.captures), (8, 8))
        for n in (15, 15, 13):
            self.call(run, n)
        self.assertEqual((len(self.device.launchers), run.outside["templates"]), (8, 2))

    def test_forgotten_during_a_capture(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5):
            self.call(run, n)
        make = region_graphs.make_or_blame

        def made(work):
            result = make(work)
            run.forget()
            return result

        with mock.patch.object(region_graphs, "make_or_blame", made):
            self.call(run, 5)
        self.assertEqual(run.states.captures, 0)

    def test_function_that_no_proof_has_seen_takes_a_second_capture(self):
        source = SIZED.replace(
            "out=new(n, 4))\n    return", "out=new(n, 4)) if n < 9 else torch.square(b, out=new(n, 4))\n    return"
        )
        run = self.sized(source)
        for n in (3, 3, 4, 4):
            self.call(run, n)
        self.assertEqual(self.captures(), 3)
        for n in (9, 9):
            self.call(run, n)
        self.assertEqual(self.captures(), 5)
        for n in (10, 10, 9, 4, 10):
            self.call(run, n)
        self.assertEqual(self.captures(), 6)
        self.assertEqual(len(self.device.launchers), 2, "another function is no other executable")

    def test_further_size_waits_until_the_region_can_afford_its_capture(self):
        run = self.sized()
        for n in (3, 3):
            self.call(run, n)
        self.enterContext(mock.patch.object(Governor, "affords_capture", AFFORDS_CAPTURE))
        self.enterContext(mock.patch.object(governor, "FEW", 1))
        for without, capture, waits in ((-1e9, 0.0, 3), (1e9, 1e9, 6), (1e9, 1e-9, 6)):
            run.region.governor.capture, run.region.governor.without = capture, without
            for _ in range(4 if without < 0 else 3):
                self.call(run, 7)
            self.assertEqual(run.outside["size-waits"], waits)
        self.assertEqual((self.counted("captures"), run.states[(7,)].waited > 0), (2, True))
        self.assertEqual(run.outside["warm-up"], 3, "what a capture has to know is noted just before it")
        for n in (7, 3):
            self.call(run, n)
        self.assertEqual((run.outside["size-waits"], self.counted("relaunches")), (6, 5))
        run = self.sized(verify=True)
        for n in (3, 3, 7, 7):
            self.call(run, n)
        self.assertEqual(run.outside, {"warm-up": 2}, "each launch is to be verified")

    def test_few_sizes_are_captured_at_once_and_more_are_not(self):
        self.enterContext(mock.patch.object(Governor, "affords_capture", AFFORDS_CAPTURE))
        self.enterContext(mock.patch.object(governor, "FEW", 2))
        run = self.sized()
        for n in (3, 3, 7, 7, 9, 9, 9):
            self.call(run, n)
        self.assertEqual((self.counted("captures"), run.outside), (2, {"warm-up": 3, "size-waits": 2}))
        run = self.sized()
        for n in (3, 7, 9, 3, 7, 9):
            self.call(run, n)
        self.assertEqual((self.counted("captures"), run.outside), (2, {"warm-up": 3, "size-waits": 3}))

    def test_verified(self):
        run = self.sized(verify=True)
        for n in (3, 3, 4, 4, 5, 5, 3, 4, 5):
            self.call(run, n)

    def test_misaligned_inputs_of_a_shared_size(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5):
            self.call(run, n)
        for n in (4, 5, 4, 4):
            x = torch.randn(4 * n + 1)[1:].view(n, 4)
            got = run([x, self.w, n])
            self.assertEqual(got[0], expected(x, self.w, n)[0])
            self.call(run, n)

    def test_backward_in_stages(self):
        self.cut_into_stages()
        self.backward(512, 512, 600, 600, 700, 700, 512, 600, 640, 640, 700)
        stages = len(self.device.arrangements[-1].stages)
        self.assertGreater(stages, 1)
        self.assertEqual(len(self.device.launchers), 2 * stages)

    def test_backward_that_the_driver_cannot_cut(self):
        self.cut_into_stages()
        self.device.cuts = False
        self.backward(512, 512, 600, 600, 700, 700, 512, 600, 640, 640, 700)
        self.assertEqual(len(self.device.launchers), 2)

    def test_generators_that_advance_otherwise_share_nothing(self):
        source = SIZED.replace("    return", "    args_of_device.offset += n % 2\n    return")
        run = self.sized(source, args_of_device=self.device.generator)
        for n in (4, 4, 6, 6, 5, 5, 8, 8, 7, 7):
            self.call(run, n)
        self.assertEqual(len(self.device.launchers), 3, "the first, that of even sizes, that of odd ones")

    def test_threads_with_other_sizes(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5, 6, 6):
            self.call(run, n)
        errors = []

        def work(n):
            try:
                for _ in range(30):
                    self.call(run, n)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in (3, 4, 5, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_forgotten(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5):
            self.call(run, n)
        run.forget()
        gc.collect()
        self.assertEqual(run.states.sizes.executables, [])
        for n in (3, 3, 4, 4, 5, 5):
            self.call(run, n)

    def test_a_size_that_is_dropped_leaves_nothing_behind(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5):
            self.call(run, n)
        del run.states[(5,)]
        gc.collect()
        for n in (4, 6, 6, 4, 6):
            self.call(run, n)

    def test_shared_arguments(self):
        module, node = self.device.module, (0, 0x1000, 0, "a node", bytes(72), ())
        shared = module.Shared(2)
        module.Blocks(0, (node,), (), 0, (), (shared, (1,)))
        for given, kind in (
            (3, TypeError), ((shared,), TypeError), ((3, (0,)), TypeError), ((shared, ()), ValueError),
            ((shared, (2,)), ValueError), ((shared, (-1,)), OverflowError), ((shared, ("a",)), TypeError),
        ):  # fmt: skip
            with self.assertRaises(kind):
                module.Blocks(0, (node,), (), 0, (), given)
        with self.assertRaises(ValueError):
            module.Shared(-1)
        with self.assertRaises(TypeError):
            module.Shared(1, None, True, 0)


class TestSizesInTurn(SizesTestCase):
    def test_no_node_is_set(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5, 4, 5, 4, 5):
            self.call(run, n)
        calls = [run.states[(n,)].relaunch.call for n in (4, 5)]
        self.assertEqual([(call.by_node, call.patched) for call in calls], [(3, 0), (3, 0)])
        self.assertEqual([(graph.nodes, graph.one_by_one) for graph in run.graphs()], [(3, 0), (3, 6), (3, 6)])

    def test_backward_in_stages(self):
        self.cut_into_stages()
        run = self.backward(512, 512, 600, 600, 700, 700, 600, 700, 600, 700)
        stages = run.states[(600,)].relaunch.stages
        self.assertGreater(len(stages), 1)
        self.assertEqual({stage.call.by_node for stage in stages}, {3})

    def test_clusters_of_further_sizes_are_launched_without_an_executable(self):
        run = self.sized()
        self.call_with_clusters(lambda n: self.call(run, n), range(3, 12))
        made = run.states.sizes
        self.assertEqual((made.instantiated, self.counted("captures")), (sizes.MOST, 9))
        for n in (9, 9, 4, 4, 11, 5, 3):
            self.call(run, n)
        calls = [run.states[(n,)].relaunch.call for n in (9, 11)]
        self.assertEqual([(call.launches, call.by_node, call.patched) for call in calls], [(3, 3, 0), (2, 2, 0)])
        self.assertTrue(all(state.relaunch is not None for state in run.states.values()))

    def test_further_shapes_do_without_an_executable(self):
        run = self.sized(BRANCHED)
        with mock.patch.object(sizes, "MOST", 2):
            for n in (3, 3, 5, 5, 6, 6, 10, 10, 7, 7, 8, 8, 9, 9, 13, 13):
                self.call(run, n)
        self.assertEqual(run.states.sizes.instantiated, 2)
        for n in (7, 8, 5, 9, 8, 8, 13, 3, 7):
            self.call(run, n)
        calls = {n: run.states[(n,)].relaunch.call for n in (7, 8, 9)}
        self.assertEqual([(call.launches, call.by_node) for call in calls.values()], [(3, 3), (4, 4), (2, 2)])
        self.assertTrue(all(state.relaunch is not None for state in run.states.values()))
        launchers = [state.relaunch.launcher for state in run.states.values()]
        of_executables = [each for each in launchers if not isinstance(each, executable.ByNode)]
        self.assertLess(len(of_executables), len(launchers))
        bare = [replay.__self__ for replay in runners.bare_replays()]
        self.assertCountEqual([each for each in bare if each in launchers], of_executables)

    def test_graphs_keep_no_nodes_but_to_be_verified(self):
        for verify in (False, True):
            run = self.sized(verify=verify)
            self.call_with_clusters(lambda n, run=run: self.call(run, n), range(3, 9))
            kept = [state.relaunch.stages[0].template for state in run.states.values()]
            self.assertEqual([(bool(t.nodes), bool(t.slots)) for t in kept], [(verify, verify)] * 6)
            self.assertEqual([graph.nodes for graph in run.graphs()], [3] * 6)

    def test_size_whose_kernels_the_driver_refuses_has_an_executable_of_its_own(self):
        """It runs as compiled at the call that shows it."""
        for skip in range(3):
            run = self.sized()
            self.call_with_clusters(lambda n, run=run: self.call(run, n), range(3, 9))
            self.assertEqual(run.states.sizes.instantiated, sizes.MOST)
            self.call(run, 20)
            relaunch_driver.driver().fail("cuLaunchKernelEx", 1, skip)
            for n in (20, 20, 20, 8, 20):
                self.call(run, n)
            self.assertTrue(run.states[(20,)].needs_own_executable)
            self.assertEqual(launches_of(run.states[(20,)].relaunch), 3)
            self.assertEqual(run.outside["busy"], 1)

    def test_kernel_that_may_have_written_to_an_input_does_not_run_again(self):
        source = SIZED.replace("x, w, n = args", "x, w, seen, n = args").replace(
            "    a =", "    seen.add_(1)\n    a =", 1
        )
        run, seen = self.sized(source, mutated=[2]), torch.zeros(1)
        calls = iter(range(1, 100))

        def call(n):
            x = torch.randn(n, 4)
            self.assertEqual(run([x, self.w, seen, n])[0], expected(x, self.w, n)[0])
            self.assertEqual(int(seen), next(calls))

        self.call_with_clusters(call, range(3, 9))
        call(20)
        relaunch_driver.driver().fail("cuLaunchKernelEx", 1, 2)
        with self.assertRaisesRegex(RuntimeError, "cuLaunchKernelEx"):
            call(20)
        self.assertEqual(int(seen), next(calls))
        for n in (20, 20, 8, 20):
            call(n)
        self.assertTrue(run.states[(20,)].needs_own_executable)

    def test_stages_keep_no_nodes(self):
        self.cut_into_stages()
        run = self.backward(512, 512, 600, 600, 700, 700, 600)
        for state in run.states.values():
            kept = [state.relaunch.template, *[stage.template for stage in state.relaunch.stages]]
            self.assertEqual({(t.nodes, t.slots) for t in kept}, {((), ())})

    def test_clusters_of_stages(self):
        self.cut_into_stages()
        run = self.backward()
        self.call_with_clusters(lambda n: self.backward(n, run=run), range(512, 1112, 100))
        self.assertEqual(run.states.sizes.instantiated, sizes.MOST)
        stages = run.states[(1012,)].relaunch.stages
        self.assertEqual({(stage.call.by_node, stage.call.launches) for stage in stages}, {(1, 1)})
        self.backward(612, 1012, 712, 1012, 1012, 1012, run=run)


class TestSizesByTheExecutable(TestSizes):
    """Where kernels can't be launched one by one, since some may run side by side."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(relaunch_device, "only_order", return_value=None))

    def test_other_clusters_need_an_executable(self):
        run = self.sized()
        self.call_with_clusters(lambda n: self.call(run, n), range(3, 12))
        self.assertEqual(run.states.sizes.instantiated, 8)

    def test_only_what_differs_is_set(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5, 6, 6):
            self.call(run, n)

        def patched(n):
            call = run.states[(n,)].relaunch.call
            before = call.patched
            self.call(run, n)
            return call.patched - before

        held = [torch.empty(1 << 12) for _ in range(3)]  # so that addresses move
        self.assertEqual([patched(4), patched(5)], [3, 3], "all three nodes have the size in their grid")
        del held
        again = patched(5)
        self.assertLessEqual(again, 3)

    def test_after_an_error_of_the_driver_every_node_is_set(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5, 5):
            self.call(run, n)
        for skip in range(3):
            relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1, skip)
            with self.assertRaisesRegex(RuntimeError, "cuGraphExecKernelNodeSetParams"):
                run([torch.randn(4, 4), self.w, 4])
            for n in (5, 4, 5):
                self.call(run, n)

    def test_size_whose_nodes_the_driver_refuses_has_an_executable_of_its_own(self):
        run = self.sized()
        for n in (3, 3, 4, 4, 5):
            self.call(run, n)
        relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1, 1)
        for n in (5, 5, 5, 4, 3, 5, 6, 6, 6):
            self.call(run, n)
        self.assertTrue(run.states[(5,)].needs_own_executable)
        self.assertEqual((len(self.device.launchers), run.outside["busy"]), (3, 1))

    def test_stages_whose_nodes_the_driver_refuses_have_executables_of_their_own(self):
        self.cut_into_stages()
        run = self.backward(512, 512, 600, 600, 700)
        stages = len(self.device.arrangements[-1].stages)
        self.assertGreater(stages, 1)
        relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1, 4)
        self.backward(700, 700, 700, 600, 512, 700, run=run)
        self.assertTrue(run.states[(700,)].needs_own_executable)
        self.assertEqual((len(self.device.launchers), run.outside["busy"]), (3 * stages, 1))

    def test_stage_that_has_written_to_an_input_does_not_run_again(self):
        self.cut_into_stages()
        source = SAVED.replace("*saved, n = args", "seen, *saved, n = args").replace(
            "made =", "seen.add_(1)\n    made ="
        )
        run, seen = self.runner(source, is_backward=True, mutated=[0]), torch.zeros(1)
        for i, n in enumerate((512, 512, 600, 600, 700, 700, 700, 700), start=1):
            inputs = [seen, *[torch.full((n,), float(k), dtype=torch.float64) for k in range(6)], n]
            if i == 6:
                relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1, 5)
                with self.assertRaisesRegex(RuntimeError, "cuGraphExecKernelNodeSetParams"):
                    run(inputs)
            else:
                self.assertEqual([int(out[-1]) for out in run(inputs)], [k * k for k in reversed(range(6))])
            self.assertEqual(int(seen), i)
        self.assertTrue(run.states[(700,)].needs_own_executable)


def u64(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


def kernel(index, *values, func=7):
    offsets = [sum(map(len, values[:i])) for i in range(len(values))]
    return KernelNode(index, index, f"f{func}", func, 0, 0, (1, 1, 1), (1, 1, 1), 0, tuple(zip(offsets, values)))


LOW, STEP = 0x2C15A600000, 1 << 16


class TestFunctions(RelaunchTestCase):
    """What earlier proofs say of another capture."""

    def graph(self, nodes, low=LOW, sizes=(100, 100)):
        gap = 1 if low == LOW else 2
        segments = tuple(Segment(low + gap * STEP * (i + 1), size, i) for i, size in enumerate(sizes))
        return CapturedGraph(tuple(nodes), (), segments, low, low + 16 * STEP)

    def at(self, region, delta=0, low=LOW):
        return low + (1 if low == LOW else 2) * STEP * (region + 1) + delta

    def learned(self, make):
        other = LOW + 64 * STEP
        functions = Functions()
        graphs = [self.graph(make(lambda r, d=0, low=low: self.at(r, d, low)), low) for low in (LOW, other)]
        functions.learn(prove(*graphs))
        return functions

    def test_slots_are_those_of_a_proof(self):
        def make(at):
            structure = u64(at(0, 8), 5) + bytes(4) + u64(at(1))
            return [kernel(0, u64(at(0)), (9).to_bytes(4, "little"), u64(at(1, 16))), kernel(1, structure, func=8)]

        functions, graph = self.learned(make), self.graph(make(self.at))
        other = self.graph(make(lambda r, d=0: self.at(r, d, LOW + 64 * STEP)), LOW + 64 * STEP)
        self.assertEqual(functions.slots_of(graph), (list(prove(graph, other).slots), {}))

    def test_function_that_is_loaded_again(self):
        functions = self.learned(lambda at: [kernel(0, u64(at(0)), u64(3))])
        again = dataclasses.replace(kernel(0, u64(self.at(1)), u64(5)), func=70, kern=71)
        slots, unknown = functions.slots_of(self.graph([again]))
        self.assertEqual(([slot.region for slot in slots], unknown), ([1], {}))
        self.check_unknown(functions, "for the first time", dataclasses.replace(again, name="g"))

    def check_unknown(self, functions, text, node):
        known = kernel(1, u64(self.at(0)), u64(3))
        slots, unknown = functions.slots_of(self.graph([node, known]))
        self.assertEqual((list(unknown), [slot.node for slot in slots]), ([0], [1]))
        self.assertRegex(unknown[0], text)

    def test_what_no_proof_explains(self):
        functions = self.learned(lambda at: [kernel(0, u64(at(0)), u64(3)), kernel(1, u64(1, at(1), 0), func=8)])
        here = self.at(1)
        self.check_unknown(functions, "for the first time", kernel(0, u64(here), func=9))
        self.check_unknown(functions, "where there was none", kernel(0, u64(here), u64(here)))
        self.check_unknown(functions, "where there was none", kernel(0, u64(1, here, here), func=8))
        self.check_unknown(functions, "where there was none", kernel(0, u64(here, here, 0), func=8))
        self.check_unknown(functions, "outside the range", kernel(0, u64(12345), u64(3)))
        self.check_unknown(functions, "no allocation", kernel(0, u64(here + 200), u64(3)))
        self.check_unknown(functions, "for the first time", kernel(0, u64(1) + bytes(4), func=8))  # a shorter structure

    def test_address_at_an_odd_place_of_a_structure(self):
        functions = self.learned(lambda at: [kernel(0, u64(1, at(1), 0, 0, 0), func=8), kernel(1, u64(at(0)), u64(3))])
        value = u64(1, self.at(1)) + bytes(4) + u64(self.at(0)) + bytes(12)
        self.check_unknown(functions, "offset 20", kernel(0, value, func=8))

    def test_pointer_that_is_null_is_a_constant(self):
        functions = self.learned(lambda at: [kernel(0, u64(at(0)), u64(at(1)))])
        slots, _ = functions.slots_of(self.graph([kernel(0, u64(self.at(0)), u64(0))]))
        self.assertEqual([(s.parameter, s.region) for s in slots], [(0, 0)])

    def test_pointer_of_one_of_two_nodes(self):
        functions = self.learned(lambda at: [kernel(0, u64(at(0)), u64(at(1))), kernel(1, u64(at(0)), u64(0))])
        slots, _ = functions.slots_of(self.graph([kernel(0, u64(self.at(0)), u64(self.at(1, 4)))]))
        self.assertEqual([(s.parameter, s.region, s.delta) for s in slots], [(0, 0, 0), (1, 1, 4)])

    def test_memset(self):
        functions = self.learned(lambda at: [kernel(0, u64(at(0)))])
        slots, _ = functions.slots_of(self.graph([FillNode(0, 0, self.at(1, 8), 0, 4, 4, 1, 16)]))
        self.assertEqual([(s.parameter, s.region, s.delta) for s in slots], [(0, 1, 8)])
