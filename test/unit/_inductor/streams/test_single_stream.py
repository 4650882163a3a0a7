"""`_inductor.streams.single_stream`: regions that run on one stream when the device is idle."""

from unittest import mock

import torch

import form  # noqa: F401
from stand_ins.schedules import ProgramCase, PROPERTIES
from torch_overlay._functorch import device_peaks
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import copy_in_stream, copy_out_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, record, state, synchronization
from torch_overlay._inductor.streams.planned_region import plan_region
from torch_overlay._inductor.streams.single_stream import fold_branches, follows_one_stream_when_idle, handed_out


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
    def joined(self, **where):
        return self.product(self.branch(**where), self.x)

    def in_a_side_streams_memory(self):
        side = self.branch()
        return self.product(side, self.x), side

    def after(self, target, *args, **fact):
        """A fork and join, and an operation of the stream program."""
        joined = self.joined()
        self.call(target, *args, **fact)
        return (joined,)

    def downloaded(self):
        copy = self.call(prims.device_put.default, self.joined(), torch.device("cpu"), False)
        note_fact(copy, requires=blocking_copy(0))
        return (copy,)

    def test_each_reason(self):
        backward = {"is_backward": True, "is_inference": False}
        record_and_order = {"requires": record(5, 0), "order": 0}
        waits_for_event = {"requires": synchronization(0)}
        event = {"after": (CALLER, caller_event(5)), "promised_to": (CALLER,)}
        for hazard, results, options in (
            ("option is off", lambda: [self.joined()], {"limit_us": 0}),
            ("region of several", lambda: [self.joined()], {"enclosed": True}),
            ("no side stream", lambda: [self.product()], {}),
            ("result in a side stream's memory", self.in_a_side_streams_memory, {}),
            ("result of a backward", self.in_a_side_streams_memory, {"saved": [1], **backward}),
            ("branch that is not forked", lambda: [self.joined(**{**FORKED, "after": ()})], {}),
            ("branch that is not joined", lambda: [self.joined(**{**FORKED, "promised_to": ()})], {}),
            ("branch whose tokens are not known", lambda: [self.joined(reads=())], {}),
            ("event of the caller", lambda: [self.joined(**event)], {}),
            ("record", lambda: self.after(streams.record_event.default, 5, 0, **record_and_order), {}),
            ("synchronization", lambda: self.after(streams.synchronize_stream.default, 0, **record_and_order), {}),
            ("event that is awaited", lambda: self.after(streams.synchronize_event.default, 5, **waits_for_event), {}),
            ("host", lambda: [self.joined(), self.call(aten.sin.default, self.program.input(4, device="cpu"))], {}),
            ("copy to the host", self.downloaded, {}),
            ("offloading", lambda: [self.product(self.branch(stream=copy_in_stream(0)), self.branch())], {}),
            ("unknown time", lambda: [self.joined(), self.call(aten.histc.default, self.program.input(4))], {}),
        ):
            with self.subTest(hazard):
                self.setUp()
                self.assertFalse(self.follows(*results(), **options))


US_PER_MIB = (1 << 20) / 1.024e6  # of the device of inductor_schedules


class FoldingTestCase(ProgramCase):
    def setUp(self):
        super().setUp()
        self.x = self.program.input(512, 512)  # a MiB
        device_peaks.bytes_per_us.cache_clear()
        self.addCleanup(device_peaks.bytes_per_us.cache_clear)
        self.enterContext(mock.patch.object(torch.cuda, "get_device_properties", lambda device: PROPERTIES))

    def call(self, target, *args, stream=1, **fact):
        return super().call(target, *args, stream=stream, **(fact or FORKED))

    def joined(self, value):
        return self.call(aten.add.Tensor, self.x, value, stream=0, after=(), promised_to=())

    def fold(self, *results, limit_us=100.0, is_backward=False):
        self.program.output(*results)
        return fold_branches(self.program.graph, limit_us, is_backward)


class TestBranches(FoldingTestCase):
    def test_pointwise_work_and_views(self):
        first = self.call(aten.sin.default, self.x)
        branch = [first, self.call(aten.alias.default, first)]
        branch.append(self.call(aten.clone.default, branch[-1]))
        branch.append(self.call(prims.convert_element_type.default, branch[-1], torch.float16))
        self.assertEqual(self.fold(self.joined(branch[-1])), [1])
        for node in branch:
            self.assertEqual(node_stream(node), 0)

    def test_what_the_outside_knows_of_the_stream_stays_true(self):
        fact = {"after": (CALLER, caller_event(5)), "promised_to": (CALLER,)}
        node = self.call(aten.sin.default, self.x, **fact)
        self.fold(self.joined(node))
        self.assertEqual(set(fact_of(node).after), {state(1), caller_event(5)})
        self.assertEqual(set(fact_of(node).promised_to), {state(1)})

    def test_time_of_what_is_read_and_written(self):
        """Values inside of the branch are neither."""
        for limit, folded in ((2.01, [1]), (1.99, [])):
            self.setUp()
            node = self.call(aten.sin.default, self.x)
            node = self.call(aten.cos.default, node)
            limit_us = limit * US_PER_MIB
            self.assertEqual(self.fold(self.joined(node), limit_us=limit_us), folded)

    def test_each_branch_by_itself(self):
        small = self.call(aten.sin.default, self.x)
        large = self.call(aten.mm.default, self.x, self.x, stream=2)
        self.assertEqual(self.fold(self.joined(small), self.joined(large)), [1])
        self.assertEqual((node_stream(small), node_stream(large)), (0, 2))

    def test_size_with_a_hint(self):
        x = self.program.input(self.program.size(64))
        node = self.call(aten.sin.default, x)
        result = self.call(aten.add.Tensor, x, node, stream=0)
        self.assertEqual(self.fold(result, limit_us=1.0), [1])


class TestBranchesThatStay(FoldingTestCase):
    def sine(self, **fact):
        return self.call(aten.sin.default, self.x, **fact)

    def without_tokens(self):
        node = self.sine()
        note_fact(node, after=None, promised_to=None)
        return node

    def named_by_the_program(self):
        node = self.sine()
        self.program.call(streams.synchronize_stream.default, 1)
        return node

    def copy_between_devices(self):
        there = self.program.input(512, 512, device="cuda:1")
        node = self.program.graph.call_function(aten.copy_.default, (there, self.x))
        node.meta = {"val": there.meta["val"], "custom": {"stream": 1}}
        note_fact(node, **FORKED)
        return node, self.x

    def on_the_host(self):
        node = self.call(aten.sin.default, self.program.input(4, device="cpu"))
        return node, self.call(aten.cos.default, node, stream=0)

    def for_the_caller(self):
        node = self.sine()
        return node, self.joined(node), self.call(aten.slice.Tensor, node, 0, 0, 8)

    def test_each_reason(self):
        """Of a branch, and of one whose results are named."""
        for hazard, make in (
            ("a sum", lambda: self.call(aten.sin.default, self.call(aten.sum.default, self.x))),
            ("a product", lambda: self.call(aten.sin.default, self.call(aten.mm.default, self.x, self.x))),
            ("a reduction at the end", lambda: self.call(aten.sum.default, self.sine())),
            ("not forked", lambda: self.sine(**{**FORKED, "after": ()})),
            ("not joined", lambda: self.sine(**{**FORKED, "promised_to": ()})),
            ("tokens that are not known", self.without_tokens),
            ("a stream of copies", lambda: self.sine(stream=copy_out_stream(0))),
            ("a stream that the program names", self.named_by_the_program),
            ("work on the host", self.on_the_host),
            ("a copy between devices", self.copy_between_devices),
            ("memory that the caller gets", self.for_the_caller),
        ):
            with self.subTest(hazard):
                self.setUp()
                made = make()
                node, *results = made if isinstance(made, tuple) else (made, self.joined(made))
                placed = {n: node_stream(n) for n in self.program.graph.nodes}
                self.assertEqual(self.fold(*results), [])
                self.assertEqual({n: node_stream(n) for n in placed}, placed)


class TestResults(FoldingTestCase):
    def saved(self, is_backward):
        """The second result is kept for the backward, if this is a forward."""
        node = self.call(aten.sin.default, self.x)
        output = self.program.output(self.joined(node), node)
        output.meta["user_visible_output_idxs"] = [0]
        graph = self.program.graph
        return handed_out(graph, is_backward), fold_branches(graph, 100.0, is_backward)

    def test_values_that_are_kept_for_the_backward(self):
        self.assertEqual(self.saved(False), ({0}, [1]))

    def test_results_of_a_backward(self):
        self.assertEqual(self.saved(True), ({0, 1}, []))

    def test_results_that_nobody_described(self):
        self.program.output(self.x, self.x)
        self.assertEqual(handed_out(self.program.graph, False), {0, 1})
