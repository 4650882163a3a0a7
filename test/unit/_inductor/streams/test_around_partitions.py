"""`_inductor.streams.planned_region`: the order around a graph that is cut into partitions."""

from unittest import mock

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._inductor import config
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch._inductor.virtualized import V
from torch.fx import symbolic_trace

import form  # noqa: F401
from stand_ins.schedules import Program, ProgramCase, spec_of, written
from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import ExitWait, note_fact, ResultMemory
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.ids import copy_in_stream
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, state
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.streams.planned_region import HANDLE_IS_READ, ordered_around, reason_to_cut
from torch_overlay._inductor.streams.region_spec import of_device, OperationKind
from torch_overlay.frame_facts import FrameFacts, ObjectInfo


aten, streams = torch.ops.aten, torch.ops.streams
BACKWARD = {"is_backward": True, "is_inference": False}
FORKED = {"after": (CALLER,), "promised_to": (CALLER,)}


class OnTheCallersStream(CUDAGraphPolicy):
    results_are_callers = True


class PartitionsTestCase(ProgramCase):
    facts = {"after": (), "promised_to": ()}

    def setUp(self):
        super().setUp()
        self.x = self.program.input(4, 4)

    def product(self, *args, **where):
        return self.call(aten.mm.default, *(args or [self.x] * 2), **where)

    def schedule(self, *results, cudagraphs=True, policy=None, **scheduled):
        output = self.program.output(*results)
        output.meta["desc"] = [PlainAOTOutput(i) for i in range(len(results))]
        self.enterContext(config.patch({"triton.cudagraphs": cudagraphs, "cudagraph_policy": policy}))
        self.scheduler = self.enterContext(self.program.scheduled(**scheduled))
        return self.scheduler

    def around(self, *results, settled=(), **options):
        """The lines around those of the partitions."""
        scheduler = self.schedule(*results, **options)
        wrapper, first = V.graph.wrapper_code, len(V.graph.wrapper_code.lines)
        with ordered_around(scheduler):
            wrapper.writeline("partitions")
            self.known = ScheduleNotes.of(scheduler).known
            ScheduleNotes.of(scheduler).settled = frozenset(settled)
        return written(wrapper.lines[first:]).splitlines()

    def spec(self):
        return spec_of("_outer")


class TestOrder(PartitionsTestCase):
    def test_streams_of_the_user(self):
        found = self.around(self.product(stream=1, **FORKED))
        wanted = ["frame_outer, = _outer.enter()", "partitions", "frame_outer.leave()"]
        self.assertEqual(found, wanted)
        spec = self.spec()
        entry = (OperationKind.RECORD_ENTRY, 1, 1), (OperationKind.WAIT_ENTRY, 1, 0)
        leave = (OperationKind.RECORD, 0, 0), (OperationKind.WAIT_EXIT, 0, 1)
        self.assertEqual((spec.entry, spec.exit), (entry, leave))
        self.assertEqual((spec.streams, spec.events), ((of_device(0), 1), 2))
        self.assertEqual(self.known, {0: {state(1)}, 1: set()})

    def test_streams_that_are_settled_inside(self):
        node = self.product(exit_waits=(ExitWait(2, (state(3),)),), stream=1, **FORKED)
        self.around(node, settled=[1, 2])
        spec = self.spec()
        waiting = [spec.streams[stream] for kind, _, stream in spec.exit if kind == OperationKind.WAIT_EXIT]
        self.assertEqual(waiting, [3])
        self.setUp()
        self.around(self.product(stream=1, **FORKED), settled=[1])
        self.assertEqual(self.spec().exit, ())

    def test_events_of_the_caller(self):
        found = self.around(self.product(after=(caller_event(5),)))
        wanted = ["frame_outer, stream0_outer, event5_outer, = _outer.enter()"]
        wanted += ["event5_outer.wait(stream0_outer)", "partitions"]
        self.assertEqual(found, [*wanted, "frame_outer.leave()"])
        self.assertEqual(self.spec().objects, {5})

    def test_streams_that_are_only_named(self):
        """By a record, a synchronization, or the body of a nested graph."""
        made = self.product()
        self.call(streams.record_event.default, 5, 2)
        self.call(streams.synchronize_stream.default, 3)
        body = symbolic_trace(lambda x: x.sin())
        place_on(next(iter(body.graph.find_nodes(op="call_method"))), 4)
        modules = mock.patch.object(torch.fx.GraphModule, "modules", lambda gm: iter([gm, body]))
        with modules:
            self.around(made)
        self.assertEqual(self.spec().streams, (of_device(0), 2, 3, 4))

    def test_memory_that_a_backward_frees(self):
        note_fact(self.x, memory=3)
        self.around(self.product(), **BACKWARD)
        spec = self.spec()
        self.assertEqual(spec.entry, ())
        self.assertEqual([spec.streams[stream] for *_, stream in spec.exit], [of_device(0), 3])

    def test_streams_of_several_devices(self):
        """Boundary events of a capture are those of one device."""
        device = torch.device("cuda", 1)
        info = ObjectInfo(1, "caller", True, "stream", device)
        with frame_facts.compiling(FrameFacts((info,))):
            self.around(self.product(stream=1, **FORKED))
        spec = self.spec()
        self.assertIsNone(spec.device)
        kinds = [kind for kind, *_ in (*spec.entry, *spec.exit)]
        self.assertEqual(kinds, [OperationKind.RECORD, OperationKind.WAIT] * 2)

    def test_nothing_to_order(self):
        info = ObjectInfo(1, "frame", False, "stream", None)
        for node, options in (
            (dict, {}),
            (lambda: {"stream": copy_in_stream(0)}, {}),
            (lambda: {"stream": 2, **FORKED}, {"cudagraphs": False}),
            (lambda: {"stream": 1, **FORKED}, {}),  # a stream that nobody else sees
        ):
            self.setUp()
            with frame_facts.compiling(FrameFacts((info,))):
                found = self.around(self.product(**node()), **options)
            self.assertEqual(found, ["partitions"])

    def results(self, policy):
        memory = (ResultMemory("output[0]", (0, 1, 2)),)
        return self.around(self.product(stream=1, results=memory), policy=policy)

    def test_results_on_the_callers_stream(self):
        found = self.results(OnTheCallersStream())
        wanted = "frame_outer, stream1_outer, stream2_outer, = _outer.enter()"
        self.assertEqual(found[0], wanted)
        capturing = "if not torch.cuda.is_current_stream_capturing(): "
        records = [f"{capturing}buf0.record_stream(stream{s}_outer)" for s in (1, 2)]
        self.assertEqual(found[-2:], records)


class TestCuts(PartitionsTestCase):
    def reasons(self, *results, **options):
        scheduler = self.schedule(*results, **options)
        return [reason_to_cut(scheduler, node) for node in scheduler.nodes]

    def test_operations_of_the_stream_program(self):
        made = self.product(stream=1, **FORKED)
        self.call(streams.record_event.default, 5, 1)
        reasons = self.reasons(made)
        self.assertEqual(sorted(map(str, reasons)), ["None", "stream operation streams.record_event.default"])

    def test_several_devices(self):
        for where, wanted in ((0, None), (1, "streams on several devices")):
            self.program = Program()
            self.x = self.program.input(4, 4)
            other = self.program.input(4, 4, device="cuda:1")
            fact = FORKED if where else {}
            results = self.product(stream=where, **fact), self.product(other, other)
            self.assertEqual(self.reasons(*results), [wanted] * 2)

    def test_handle_that_is_read(self):
        for is_read, wanted in ((False, None), (True, HANDLE_IS_READ)):
            self.setUp()
            with frame_facts.compiling(FrameFacts(handle_is_read=is_read)):
                self.around(self.product(stream=1, **FORKED))
            self.assertEqual(V.graph.disable_cudagraphs_reason, wanted)
