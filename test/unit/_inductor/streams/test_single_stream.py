"""`_inductor.streams.single_stream`: regions that run on one stream when the device is idle."""

import torch

import form  # noqa: F401
from stand_ins.schedules import ProgramCase
from torch_overlay._functorch import device_peaks
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.ids import copy_in_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, record, state, synchronization
from torch_overlay._inductor.streams.planned_region import plan_region
from torch_overlay._inductor.streams.single_stream import follows_one_stream_when_idle


aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
CALLER = state(0)
FORKED = {"after": (CALLER,), "promised_to": (CALLER,)}
ON_CALLERS = {"after": (), "promised_to": ()}
SIZE = 256
LONGEST_US = 2 * SIZE**3 / (100 * 256 * 1e3)  # of a product


class IdleTestCase(ProgramCase):
    def setUp(self):
        super().setUp()
        for forget in (device_peaks.bytes_per_us.cache_clear, device_peaks.flops_per_us.cache_clear):
            forget()
            self.addCleanup(forget)
        self.x = self.program.input(SIZE, SIZE)

    def call(self, target, *args, stream=0, **fact):
        return super().call(target, *args, stream=stream, **(fact or (FORKED if stream else ON_CALLERS)))

    def product(self, *args, **where):
        return self.call(aten.mm.default, *(args or [self.x] * 2), **where)

    def branch(self, **where):
        return self.product(**{"stream": 1, **where})

    def follows(self, *results, limit_us=1000.0, enclosed=False, saved=(), **options):
        output = self.program.output(*results)
        output.meta["user_visible_output_idxs"] = [i for i in range(len(results)) if i not in saved]
        strides = [node.meta["val"].stride() for node in results]
        output.meta["original_output_strides"] = strides
        with self.program.scheduled(**options) as scheduler:
            region = plan_region(scheduler, scheduler.nodes, enclosed)
            return follows_one_stream_when_idle(region, limit_us)


class TestRegionsThatFollow(IdleTestCase):
    def test_fork_and_join(self):
        side = self.branch()
        self.assertTrue(self.follows(self.product(side, self.x)))

    def test_limit(self):
        for limit_us, wanted in ((LONGEST_US + 1, True), (LONGEST_US - 1, False)):
            self.setUp()
            joined = self.product(self.branch(), self.x)
            self.assertEqual(self.follows(joined, limit_us=limit_us), wanted)

    def test_value_that_is_saved_for_the_backward(self):
        side = self.branch()
        joined = self.product(side, self.x)
        self.assertTrue(self.follows(joined, side, saved=[1]))

    def test_several_branches(self):
        branches = [self.branch(stream=s) for s in (1, 2)]
        self.assertTrue(self.follows(self.product(*branches)))


class TestRegionsThatRunAsPlanned(IdleTestCase):
    def assert_as_planned(self, *results, **options):
        results = results or (self.product(self.branch(), self.x),)
        self.assertFalse(self.follows(*results, **options))

    def test_option_is_off(self):
        self.assert_as_planned(limit_us=0)

    def test_region_of_several(self):
        self.assert_as_planned(enclosed=True)

    def test_no_side_stream(self):
        self.assert_as_planned(self.product())

    def test_result_in_a_side_streams_memory(self):
        side = self.branch()
        self.assert_as_planned(self.product(side, self.x), side)

    def test_result_of_a_backward(self):
        side = self.branch()
        joined = self.product(side, self.x)
        options = {"is_backward": True, "is_inference": False}
        self.assert_as_planned(joined, side, saved=[1], **options)

    def test_branch_that_is_not_forked_or_not_joined(self):
        for name in ("after", "promised_to"):
            self.setUp()
            side = self.branch(**{**FORKED, name: ()})
            self.assert_as_planned(self.product(side, self.x))

    def test_branch_whose_tokens_are_not_known(self):
        side = self.branch(reads=())
        self.assert_as_planned(self.product(side, self.x))

    def test_event_of_the_caller(self):
        side = self.branch(after=(CALLER, caller_event(5)), promised_to=(CALLER,))
        self.assert_as_planned(self.product(side, self.x))

    def test_operations_of_the_stream_program(self):
        for target, args in ((streams.record_event.default, (5, 0)), (streams.synchronize_stream.default, (0,))):
            self.setUp()
            joined = self.product(self.branch(), self.x)
            self.call(target, *args, requires=record(5, 0), order=0)
            self.assert_as_planned(joined)

    def test_synchronization_of_an_event(self):
        joined = self.product(self.branch(), self.x)
        self.call(streams.synchronize_event.default, 5, requires=synchronization(0))
        self.assert_as_planned(joined)

    def test_work_of_the_host(self):
        joined = self.product(self.branch(), self.x)
        host = self.call(aten.sin.default, self.program.input(4, device="cpu"))
        self.assert_as_planned(joined, host)

    def test_copy_to_the_host(self):
        joined = self.product(self.branch(), self.x)
        args = joined, torch.device("cpu"), False
        copy = self.call(prims.device_put.default, *args)
        note_fact(copy, requires=blocking_copy(0))
        self.assert_as_planned(copy)

    def test_copies_of_offloading(self):
        copied = self.branch(stream=copy_in_stream(0))
        self.assert_as_planned(self.product(copied, self.branch()))

    def test_kernel_whose_time_is_not_known(self):
        joined = self.product(self.branch(), self.x)
        other = self.call(aten.histc.default, self.program.input(4))
        self.assert_as_planned(joined, other)
