"""`_functorch.streams.program`: copies between devices order both streams."""

import random
from collections import Counter
from unittest import mock

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.source import CurrentStreamSource, LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph

import form  # noqa: F401
from stand_ins.schedules import NumberedCase
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import ExitWait
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.program import PeerCopies, Program
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, record, state, synchronization


aten, streams = torch.ops.aten, torch.ops.streams
MODE = FakeTensorMode()
STREAMS = range(4)  # of which 0 and 3 are current, on devices 0 and 1
THEIRS, OURS = (4, 5), (6, 7)  # events of the caller, and of the frame
OTHER = 1_000_002  # the stream that is current on device 2, which no frame names


def fake(device):
    return FakeTensor(MODE, torch.empty(4, device="meta"), torch.device(device))


class ProgramTestCase(NumberedCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(torch.accelerator, "current_device_index", lambda: 0))
        self.objects = []
        for index in STREAMS:
            device = torch.device("cuda", int(index == 3))
            stream = torch.Stream(stream_id=index, device_index=device.index, device_type=1)
            self.objects.append(stream)
            if index == 0:
                numbering.register_user_object(stream, CurrentStreamSource(device))
            elif index == 3:
                registry.add_current(stream, CurrentStreamSource(device))
            else:
                numbering.register_user_object(stream, LocalSource(f"s{index}"))
        for index in THEIRS:
            self.objects.append(torch.Event("cuda"))
            numbering.register_user_object(self.objects[-1], LocalSource(f"e{index}"))
        for _ in OURS:
            registry.add_owned(torch.Event("cuda"), torch.Event, (), {})
        self.begin()

    def begin(self):
        self.graph = Graph()
        self.inputs = [self.graph.placeholder(f"x{i}") for i in range(3)]
        for index, node in enumerate(self.inputs):
            node.meta["val"] = fake(f"cuda:{index}")

    def call(self, target, *args, stream=0, to=None):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        node.meta["val"] = None if to is None else fake(to)
        return node

    def kernel(self, stream):
        return self.call(aten.relu.default, self.inputs[0], stream=stream, to="cuda:0")

    def copy(self, stream, source, to):
        source = self.inputs[source]
        return self.call(aten._to_copy.default, source, stream=stream, to=to)

    def program(self):
        return Program(list(self.graph.nodes), registry.facts())


class Points:
    """All points in time of a program, with all that come before each: explicit, where a Program keeps clocks."""

    def __init__(self):
        self.last = {s: ("entry", s) for s in STREAMS}
        self.event = {}
        self.host, self.blocked = [], []  # what the host has waited for
        self.before = {}
        self.before_alone = {}  # without synchronizations, which have tokens
        self.own, self.tokens, self.counts = {}, {}, Counter()

    def add(self, point, after, after_host=True):
        for known, host in ((self.before, self.host), (self.before_alone, self.blocked)):
            known[point] = set()
            for other in [*after, *(host if after_host else ())]:
                known[point] |= {other, *known.get(other, ())}

    def count(self, kind):
        self.counts[kind] += 1
        return self.counts[kind] - 1

    def run(self, node, own, *others):
        """A node that streams run."""
        self.add(node, [self.last[s] for s in (own, *others)])
        self.own[node] = own
        for stream in (own, *others):
            self.last[stream] = node

    def block(self, node, own):
        self.run(node, own)
        self.tokens[node] = blocking_copy(self.count("copies"))
        self.host.append(node)
        self.blocked.append(node)

    def record(self, node, event, stream):
        self.run(node, stream)
        self.tokens[node] = record(event, self.count(event))
        self.event[event] = node

    def wait(self, node, stream, other):
        self.add(node, [self.last[stream], other])
        self.last[stream] = node

    def synchronize(self, node, others, after_host=True):
        self.add(node, others, after_host)
        self.tokens[node] = synchronization(self.count("synchronizations"))
        self.host.append(node)

    def of_event(self, event):
        return self.event.get(event, ("event", event))

    def expected(self, kept):
        """What each node that streams run is after, and what is after it."""
        for stream in STREAMS:
            self.add(("exit", stream), [self.last[stream]])
            self.tokens["exit", stream] = state(stream)
        after, before = {}, {}
        for node, own in self.own.items():
            found = [p for p in self.before[node] if isinstance(p, tuple)]
            make = {"entry": state, "event": caller_event}
            after[node] = {make[kind](index) for kind, index in found} - {state(own)}
            found = {
                token
                for point, token in self.tokens.items()
                if node in self.before_alone[point] and (token.nth < 0 or token.index in kept)
            }
            before[node] = found - {state(own)}
        return after, before


class TestDrawnPrograms(ProgramTestCase):
    def draw(self, rng):
        points, read = Points(), set()
        for stream in STREAMS:
            points.run(self.kernel(stream), stream)
        for _ in range(rng.randrange(4, 24)):
            a, b = rng.sample(STREAMS, 2)
            event = rng.choice(THEIRS + OURS)
            kind = rng.randrange(12)
            if kind < 3:
                points.run(self.kernel(a), a)
            elif kind < 5:
                node = self.call(streams.record_event.default, event, a)
                points.record(node, event, a)
            elif kind < 7 and (event in points.event or event in THEIRS):
                node = self.call(streams.wait_event.default, event, a)
                points.wait(node, a, points.of_event(event))
            elif kind == 7:
                node = self.call(streams.wait_stream.default, a, b)
                points.wait(node, a, points.last[b])
            elif kind == 8 and (event in points.event or event in THEIRS):
                node = self.call(streams.synchronize_event.default, event)
                # What blocked the host after the record is not said to be before.
                points.synchronize(node, [points.of_event(event)], after_host=False)
                read.add(event)
            elif kind == 9:
                if rng.randrange(3):
                    node = self.call(streams.synchronize_stream.default, a)
                    points.synchronize(node, [points.last[a]])
                else:
                    node = self.call(streams.synchronize_device.default, 0)
                    points.synchronize(node, list(points.last.values()))
            elif kind == 10:
                points.block(self.copy(a, 0, "cpu"), a)
            elif kind == 11:
                source = rng.randrange(2)
                node = self.copy(a, source, f"cuda:{1 - source}")
                ends = (a, 3) if a != 3 else (3, 0)
                points.run(node, *ends)
        return points, read

    def test_walks(self):
        rng, seen = random.Random(0), Counter()
        for _ in range(100):
            self.begin()
            points, read = self.draw(rng)
            program = self.program()
            kept = {*THEIRS, *read}
            after, before = points.expected(kept)
            found = program.after()[0], program.promised_to()
            for node in after:
                text = f"{self.graph}\n{node}"
                self.assertEqual(found[0][node], after[node], text)
                self.assertEqual(found[1][node], before[node], text)
                seen.update(t.kind + "<" for t in after[node])
                seen.update(t.kind + ">" for t in before[node])
            tokens = {n: t for n, t in points.tokens.items() if not isinstance(n, tuple)}
            self.assertEqual(program.tokens, tokens)
        for kind in ("s<", "e<", "s>", "e>", "h>", "c>"):
            self.assertGreater(seen[kind], 60, kind)


class TestPrograms(ProgramTestCase):
    def leave(self):
        return self.program().after()[1]

    def test_streams_that_a_program_names(self):
        self.assertEqual(self.program().streams, {0})
        self.kernel(2)
        self.call(streams.record_event.default, 4, 9)
        self.call(streams.wait_event.default, 4, 10)
        self.call(streams.wait_stream.default, 11, 12)
        self.call(streams.synchronize_stream.default, 13)
        self.call(streams.record_stream.default, self.inputs[0], 14)
        self.call(streams.synchronize_event.default, 5)
        self.assertEqual(self.program().streams, {0, 2, *range(9, 15)})

    def test_what_stays(self):
        made = [self.call(streams.record_event.default, event, 1) for event in (*THEIRS, *OURS)]
        wait = self.call(streams.wait_event.default, 7, 0)
        join = self.call(streams.wait_stream.default, 0, 1)
        self.call(streams.synchronize_event.default, 6)
        sync = self.call(streams.synchronize_stream.default, 1)
        freed = self.call(streams.sync_dealloc.default, 7, 0, self.inputs[0])
        program = self.program()
        found = [program.keeps(n) for n in (*made, wait, join, sync, freed)]
        self.assertEqual(found, [True, True, True, False, False, False, True, False])

    def test_streams_are_left_after_what_they_waited_for(self):
        self.call(streams.wait_stream.default, 1, 0)
        self.call(streams.wait_event.default, 4, 2)
        self.call(streams.record_event.default, 6, 1)
        self.call(streams.wait_event.default, 6, 3)
        wanted = (ExitWait(1, (state(0),)), ExitWait(2, (caller_event(4),)), ExitWait(3, (state(0), state(1))))
        self.assertEqual(self.leave(), wanted)

    def test_streams_are_left_after_a_copy_that_may_be_left_out(self):
        for stream in (1, 2):
            self.kernel(stream)
        self.call(streams.wait_stream.default, 2, 1)
        self.copy(1, 0, "cpu")
        self.copy(1, 0, "cpu")
        first = blocking_copy(0)
        self.assertEqual(self.leave(), (ExitWait(0, (state(1),), first), ExitWait(2, (state(1),))))

    def test_host_passes_on_what_it_learnt(self):
        self.call(streams.wait_stream.default, 1, 2)
        self.call(streams.synchronize_stream.default, 1)
        later = self.kernel(0)
        found, leave = self.program().after()
        self.assertEqual(found[later], {state(1), state(2)})
        self.assertEqual(leave, (ExitWait(1, (state(2),)),))


class TestPeerCopies(ProgramTestCase):
    def ends(self, node):
        return PeerCopies(registry.facts()).ends(node)

    def test_streams_of_both_devices(self):
        there = [(s, self.copy(s, 0, "cuda:1")) for s in STREAMS]
        back = [(s, self.copy(s, 1, "cuda:0")) for s in STREAMS]
        self.assertEqual([self.ends(node) for _, node in there], [(0, 3), (1, 3), (2, 3), (0, 3)])
        self.assertEqual([self.ends(node) for _, node in back], [(3, 0), (3, 1), (3, 2), (3, 0)])

    def test_device_whose_streams_nobody_names(self):
        self.assertEqual(self.ends(self.copy(1, 0, "cuda:2")), (1, OTHER))
        self.assertEqual(self.ends(self.copy(1, 2, "cuda:0")), (OTHER, 1))
        self.assertEqual(self.ends(self.copy(1, 2, "cuda:1")), (OTHER, 3))

    def test_other_nodes(self):
        first, second, _ = self.inputs
        for node in (
            self.kernel(1),
            self.copy(1, 0, "cuda:0"),
            self.copy(1, 0, "cpu"),
            self.call(aten.add.Tensor, first, second, to="cuda:0"),
        ):
            self.assertIsNone(self.ends(node))
        written = self.call(aten.copy.default, first, second, stream=2, to="cuda:0")
        self.assertEqual(self.ends(written), (3, 2))
        put = self.call(torch.ops.prims.device_put.default, first, "cuda:1", stream=2, to="cuda:1")
        self.assertEqual(self.ends(put), (2, 3))
