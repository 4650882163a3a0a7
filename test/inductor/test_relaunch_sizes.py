"""Tests of regions with several sizes: each size that is captured has executables of its own."""

import dataclasses
import functools
import gc
from unittest import mock

import torch

import form  # noqa: F401
from stand_ins.relaunch_case import region, RelaunchTestCase, run_in_threads, SQUARES
from torch_overlay import config
from torch_overlay._inductor.relaunch import governor, region_graphs
from torch_overlay._inductor.relaunch.governor import Governor


AFFORDS_CAPTURE = Governor.affords_capture  # the stand-in device has another
SIZED = region(
    "x, w, n",
    "a = torch.mm(x, w, out=new(n, 4))",
    "b = torch.sin(a, out=new(n, 4))",
    "del a",
    "c = torch.mul(b, b, out=new(n, 4))",
    "return (c, b[n // 2:], n)",
)


def expected(x, w, n):
    b = torch.sin(x @ w)
    return b * b, b[n // 2 :], n


class TestSizes(RelaunchTestCase):
    def sized(self, *sizes, **options):
        """A runner of SIZED, called with these sizes."""
        run = self.runner(SIZED, **options)
        self.w = torch.randn(4, 4)
        self.call(run, *sizes)
        return run

    def backward(self, *sizes):
        """A runner of SQUARES, called with these sizes."""
        run = self.runner(SQUARES, is_backward=True)
        for n in sizes:
            made = run([*[torch.full((n,), float(k), dtype=torch.float64) for k in range(6)], n])
            want = [torch.full((n,), float(k * k), dtype=torch.float64) for k in reversed(range(6))]
            self.assertEqual(list(made), want)
        return run

    def call(self, run, *sizes):
        for n in sizes:
            x = torch.randn(n, 4)
            got = run([x, self.w, n])
            for have, want in zip(got, expected(x, self.w, n), strict=True):
                self.assertEqual(have, want, f"size {n}")

    def check_graphs(self, run, sizes, stages=1, captured=0):
        """Each of these sizes has a graph of its own, and so many were captured, if not each only once."""
        captured = captured or len(sizes)
        self.assertEqual({key[0] for key, state in run.states.items() if state.relaunch is not None}, set(sizes))
        self.assertEqual((self.counted("captures"), len(self.device.random)), (captured, 2 * captured))
        self.assertEqual(len(self.device.executables), captured * stages)

    def test_each_size_has_an_executable_of_its_own(self):
        run = self.sized(3, 3, 3, *range(4, 12), *range(11, 3, -1), 5, 9, 3, 3, 7, 7, 3)
        self.check_graphs(run, range(3, 12))

    def test_graphs_are_kept_and_captured_up_to_the_bound(self):
        with config.patch(cudagraph_templates=2):
            run = self.sized()
        for n in range(3, 11):
            self.call(run, n, n)
        self.assertEqual(len(run.graphs()), 2)
        self.check_graphs(run, (9, 10), captured=8)
        self.call(run, 3, 3, 9, 11)
        self.check_graphs(run, (9, 10), captured=8)
        self.assertEqual(run.outside["templates"], 3)

    def test_a_new_size_is_not_observed(self):
        run = self.sized(3, 3, 4)
        self.assertEqual(run.states[(4,)].plan, dataclasses.replace(run.states[(3,)].plan, asked={}))

    def test_forgotten_during_a_capture(self):
        run = self.sized(3, 3, 4, 4, 5)
        make = region_graphs.make_or_blame

        def made(work):
            result = make(work)
            run.forget()
            return result

        with mock.patch.object(region_graphs, "make_or_blame", made):
            self.call(run, 5)
        self.assertEqual(run.states.captures, 0)

    def test_further_size_waits_until_the_region_can_afford_its_capture(self):
        run = self.sized(3, 3)
        self.enterContext(mock.patch.object(Governor, "affords_capture", AFFORDS_CAPTURE))
        self.enterContext(mock.patch.object(governor, "FEW", 1))
        for without, capture, waits in ((-1e9, 0.0, 3), (1e9, 1e9, 6), (1e9, 1e-9, 6)):
            run.region.governor.capture, run.region.governor.without = capture, without
            self.call(run, *[7] * (4 if without < 0 else 3))
            self.assertEqual(run.outside["size-waits"], waits)
        self.assertEqual((self.counted("captures"), run.states[(7,)].waited > 0), (2, True))
        self.assertEqual(run.outside["warm-up"], 3, "what a capture has to know is noted just before it")
        self.call(run, 7, 3)
        self.assertEqual((run.outside["size-waits"], self.counted("relaunches")), (6, 5))
        run = self.sized(3, 3, 7, 7, verify=True)
        self.assertEqual(run.outside, {"warm-up": 2}, "each launch is to be verified")

    def test_few_sizes_are_captured_at_once_and_more_are_not(self):
        self.enterContext(mock.patch.object(Governor, "affords_capture", AFFORDS_CAPTURE))
        self.enterContext(mock.patch.object(governor, "FEW", 4))
        run = self.sized(3, 3, 7, 7, 9, 9, 9)
        self.assertEqual((self.counted("captures"), run.outside), (2, {"warm-up": 4, "size-waits": 1}))
        self.call(run, 9, 9)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (3, 4))
        run = self.sized(3, 7, 9, 11, 13, 3, 7, 9)
        self.assertEqual((self.counted("captures"), run.outside), (3, {"warm-up": 5, "size-waits": 3}))

    def test_verified(self):
        self.sized(3, 3, 4, 4, 5, 5, 3, 4, 5, verify=True)

    def test_misaligned_inputs_of_one_of_the_sizes(self):
        run = self.sized(3, 3, 4, 4, 5, 5)
        for n in (4, 5, 4, 4):
            x = torch.randn(4 * n + 1)[1:].view(n, 4)
            got = run([x, self.w, n])
            self.assertEqual(got[0], expected(x, self.w, n)[0])
            self.call(run, n)

    def test_backward_in_stages(self):
        self.cut_into_stages()
        run = self.backward(512, 512, 600, 600, 700, 700, 512, 600, 640, 640, 700)
        stages = len(self.device.arrangements[-1].stages)
        self.assertGreater(stages, 1)
        self.check_graphs(run, (512, 600, 640, 700), stages)
        for state in run.states.values():
            kept = [state.relaunch.template, *[stage.template for stage in state.relaunch.stages]]
            self.assertEqual({(t.nodes, t.slots) for t in kept}, {((), ())})

    def test_graphs_keep_no_nodes_but_to_be_verified(self):
        for verify in (False, True):
            run = self.sized(verify=verify)
            for n in range(3, 9):
                self.call(run, n, n)
            kept = [state.relaunch.stages[0].template for state in run.states.values()]
            self.assertEqual([(bool(t.nodes), bool(t.slots)) for t in kept], [(verify, verify)] * 6)
            self.assertEqual([graph.nodes for graph in run.graphs()], [3] * 6)

    def test_threads_with_other_sizes(self):
        run = self.sized(3, 3, 4, 4, 5, 5, 6, 6)
        errors = []

        def work(n):
            try:
                for _ in range(30):
                    self.call(run, n)
            except BaseException as error:
                errors.append(error)

        run_in_threads(*[functools.partial(work, n) for n in (3, 4, 5, 6)])
        self.assertEqual(errors, [])

    def test_forgotten(self):
        run = self.sized(3, 3, 4, 4, 5, 5)
        run.forget()
        gc.collect()
        self.assertEqual(run.graphs(), [])
        self.call(run, 3, 3, 4, 4, 5, 5)

    def test_a_size_that_is_dropped_leaves_nothing_behind(self):
        run = self.sized(3, 3, 4, 4, 5, 5)
        del run.states[(5,)]
        gc.collect()
        self.call(run, 4, 6, 6, 4, 6)
