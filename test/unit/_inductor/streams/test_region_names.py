"""`_inductor.streams.region_names`: names of streams and events in generated code."""

from types import SimpleNamespace

import torch
from torch._inductor.utils import IndentedBuffer

import form  # noqa: F401
from stand_ins.schedules import device, NumberedCase
from torch_overlay import frame_facts
from torch_overlay._functorch.streams.ids import copy_in_stream, copy_out_stream
from torch_overlay._functorch.streams.tokens import caller_event
from torch_overlay._inductor.streams.plan import BoundaryWait, Event, Op, Plan
from torch_overlay._inductor.streams.planned_region import PlannedRegion
from torch_overlay._inductor.streams.region_names import RegionNames
from torch_overlay._inductor.streams.region_spec import of_device, OperationKind
from torch_overlay.frame_facts import FrameFacts, ObjectInfo


class RegionNamesTestCase(NumberedCase):
    def setUp(self):
        super().setUp()
        self.enterContext(device())
        self.root = SimpleNamespace(header=IndentedBuffer(), imports=IndentedBuffer())

    def names(self, *streams, devices=(0,), private=(), enclosed=False, **plan):
        """Those of a region with an operation on each stream and on each device."""
        ops = tuple(Op(f"op{i}", stream) for i, stream in enumerate(streams))
        return RegionNames(
            self.root,
            PlannedRegion(
                plan=Plan(ops, **plan),
                index={},
                devices=dict(enumerate(devices)),
                numbers={},
                private=frozenset(private),
                enclosed=enclosed,
                concerned=frozenset(),
            ),
        )

    def spec(self, names):
        """The region of the generated module, as its header defines it."""
        found = {}
        exec(self.root.imports.getvalue(), found)
        exec(self.root.header.getvalue(), found)
        return found[names.name].spec

    def prologue(self, names):
        code = IndentedBuffer()
        names.write_prologue(code)
        return code.getvalue().splitlines()

    def epilogue(self, names):
        code = IndentedBuffer()
        names.write_epilogue(code)
        return code.getvalue().splitlines()


class TestNames(RegionNamesTestCase):
    def test_streams(self):
        names = self.names(0, 1)
        streams = 0, 1, copy_in_stream(0), copy_out_stream(0), copy_out_stream(2)
        wanted = ["stream0", "stream1", "stream_in", "stream_out", "stream_out2"]
        self.assertEqual(list(map(names.named, streams)), wanted)
        self.assertEqual(list(names.results), [])
        self.assertEqual(names.stream(1), "stream1")
        self.assertEqual(names.raw_stream(0), "stream0_raw")
        self.assertEqual(list(names.results), ["stream1", "stream0_raw"])

    def test_events_of_one_device_take_raw_handles(self):
        self.assertEqual(self.names(0, 1).handle(1), "stream1_raw")
        self.assertEqual(self.names(0, 1, devices=(0, 1)).handle(1), "stream1_1")

    def test_device_of_a_stream_that_runs_nothing(self):
        self.assertEqual(self.names(0, 3).device, 0)
        info = ObjectInfo(index=3, origin="caller", escapes=True, kind="stream", device=torch.device("cuda", 1))
        with frame_facts.compiling(FrameFacts((info,))):
            self.assertIsNone(self.names(0, 3).device)

    def test_callers_stream_of_another_device(self):
        other = 1_000_001
        names = self.names(0, other, devices=(1, 1))
        self.assertEqual(names.stream(other), "stream0_cuda1")
        self.prologue(names)
        self.assertEqual(self.spec(names).streams, (of_device(1),))

    def test_second_region_of_a_module(self):
        self.names(0, 1)
        names = self.names(0, 1)
        found = [names.stream(1), names.event(2), names.object(5), names.multi_stream]
        self.assertEqual(found, ["stream1_1", "ev2_1", "event5_1", "multi_stream_1"])
        self.assertEqual(self.prologue(names), [f"frame1, {', '.join(found[:-1])}, = _region1.enter()"])
        self.assertEqual(self.epilogue(names), ["frame1.leave()"])
        self.assertEqual(len(self.root.imports.getvalue().splitlines()), 1)

    def test_statements_of_calls_that_use_the_side_streams(self):
        names = self.names(0, 1, 2)
        self.assertEqual(names.if_multi_stream("f()"), "f()")
        names.keep_to_one_stream_when_idle()
        self.assertEqual(names.idle_streams, [1, 2])
        self.assertEqual(names.if_multi_stream("f()"), "if multi_stream: f()")
        self.assertEqual(names.stream_of_call(1), "stream1 if multi_stream else None")
        self.assertEqual(self.prologue(names), ["frame0, multi_stream, stream1, = _region0.enter()"])


class TestDefinition(RegionNamesTestCase):
    def test_region_that_does_nothing(self):
        names = self.names(0)
        self.assertEqual((self.prologue(names), self.epilogue(names)), ([], []))
        self.assertEqual(self.root.header.getvalue(), "")

    def test_definition(self):
        token = caller_event(5)
        names = self.names(
            0,
            1,
            events=(Event(0, 0, 1, ((1, 0),)), Event(1, 1, 0, ((2, 1),))),
            boundary_waits=(BoundaryWait(0, 1, token),),
        )
        lines = [f"{names.event(0)}.record({names.handle(1)})"]
        lines.append(f"{names.object(5)}.wait({names.stream(1)})")
        names.exit = [(OperationKind.RECORD, 1, 0), (OperationKind.WAIT, 1, 1)]
        names.may_alias = names.find_aliases()
        self.assertEqual(lines, ["ev0.record(stream1_raw)", "event5.wait(stream1)"])
        self.assertEqual(self.prologue(names), ["frame0, ev0, stream1_raw, event5, stream1, = _region0.enter()"])
        self.assertExpectedInline(
            self.root.header.getvalue(),
            """\
_region0 = region(
    device=0,
    streams=(-2, 1),  # stream0, stream1
    events=2,
    exit=((0, 1, 0), (3, 1, 1)),  # record ev1 stream0, wait ev1 stream1
    results=((2, 0), (0, 1), (3, 5), (1, 1)),  # ev0, stream1_raw, event5, stream1
    distinct=(0, 1),  # stream0, stream1
    waits_again=(5,),  # event5
)
""",
        )
        self.assertEqual(self.spec(names).exit, tuple(names.exit))

    def test_lines_that_are_written_twice(self):
        """A region is defined once, also where its lines are generated again."""
        names = self.names(0, 1)
        names.stream(1)
        first = self.prologue(names)
        self.assertEqual(self.prologue(names), first)
        self.assertEqual(self.root.header.getvalue().count("_region0"), 1)

    def test_streams_that_could_be_one(self):
        def aliases(*streams, **region):
            names = self.names(*streams, **region)
            for stream in streams:
                names.stream(stream)
            return names.find_aliases()

        self.assertEqual(aliases(0, 1, 2), [0, 1, 2])
        self.assertEqual(aliases(0), [])
        self.assertEqual(aliases(0, 1, 2, private=[1]), [0, 2])
        self.assertEqual(aliases(0, copy_in_stream(0)), [])
        self.assertEqual(aliases(0, 1, enclosed=True), [])
        self.assertEqual(aliases(0, 1, devices=(0, 1)), [])

    def test_records_that_are_made_again(self):
        names = self.names(0, 1)
        names.recorded[5, names.position(1)] = None
        names.stream(1)
        for aliases, wanted in (([], ()), ([0, 1], ((5, 1),))):
            names.may_alias, names.is_defined = aliases, False
            self.prologue(names)
            self.assertEqual(self.spec(names).records_again, wanted)

    def test_calls_on_one_stream(self):
        """They need an event to order the side streams after them."""
        names = self.names(0, 1, 2, private=[2])
        names.keep_to_one_stream_when_idle()
        self.prologue(names)
        spec = self.spec(names)
        self.assertEqual((spec.idle_streams, spec.events), ((1,), 1))
