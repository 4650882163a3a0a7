"""`_functorch.streams.epilogue`: updates of inputs on the streams that make them."""

import pickle
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams import epilogue
from torch_overlay._functorch.streams.epilogue import Promises, promises_of
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.tokens import blocking_copy, CALLER, caller_event, record, state, synchronization


MODE = FakeTensorMode()


def fake(device):
    return FakeTensor(MODE, torch.empty(4, device="meta"), torch.device(device))


class TestPromises(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def value(self, *before, stream=0, device="cuda:0"):
        """A new value of an input, with what comes after it."""
        node = self.graph.call_function(torch.ops.aten.mul.Tensor, (self.x, 2))
        node.meta["val"] = fake(device)
        place_on(node, stream)
        note_fact(node, promised_to=tuple(sorted(before)))
        return node

    def record(self, event, stream, nth=0):
        target = torch.ops.streams.record_event.default
        node = self.graph.call_function(target, (event, stream))
        note_fact(node, requires=record(event, nth))

    def promises(self, *values, count=None):
        self.graph.output(values)
        gm = GraphModule({}, self.graph)
        return promises_of(gm, len(values) if count is None else count)

    def test_most_programs_have_none(self):
        self.assertIsNone(self.promises(self.value(), self.value(CALLER), None))

    def test_streams_wait(self):
        self.assertEqual(
            self.promises(self.value(state(3), state(2), CALLER)),
            Promises((0,), (2, 3), (), False),
        )

    def test_value_of_another_stream(self):
        """The caller writes it back, so its stream comes after it."""
        side, own = self.value(state(2), stream=1), self.value()
        found = self.promises(side, own)
        self.assertEqual(found, Promises((0,), (1, 2), (), False))
        self.assertEqual(fact_of(side).promises, {CALLER, state(2)})
        self.assertEqual(fact_of(own).promises, frozenset())

    def test_events_are_recorded_again(self):
        value = self.value(record(6, 0), record(5, 0))
        self.record(6, 2)
        self.record(5, 1)
        self.record(7, 1)
        self.assertEqual(self.promises(value), Promises((0,), (), ((5, 1), (6, 2)), False))

    def test_last_record_of_an_event_counts(self):
        early, late = self.value(record(5, 0)), self.value(record(6, 0), record(6, 1))
        self.record(5, 0)
        self.record(6, 0)
        self.record(5, 0, nth=1)  # not after the value
        self.record(6, 1, nth=1)
        self.assertEqual(self.promises(early, late), Promises((0,), (), ((6, 1),), False))

    def test_host_waits(self):
        for token, waits in (
            (blocking_copy(0), True),
            (synchronization(0), True),
            (caller_event(0), False),
        ):
            self.setUp()
            found = self.promises(self.value(token))
            self.assertEqual(found, Promises((0,), (), (), True) if waits else None)

    def test_outputs_that_are_written_back(self):
        first, result = self.value(state(2)), self.value(state(3), stream=1)
        self.assertEqual(
            self.promises(None, first, result, count=2),
            Promises((0,), (2,), (), False),
        )
        self.assertEqual(fact_of(result).promises, {state(3)})

    def test_devices(self):
        for devices, wanted in (
            (("cuda:1", "cuda:0", "cuda:1"), (0, 1)),
            (("cuda:1", "cpu"), (1,)),  # the host writes to its own memory
        ):
            self.setUp()
            values = [self.value(state(2), device=device) for device in devices]
            self.assertEqual(self.promises(*values).devices, wanted)

    def test_code_for_all_ranks_names_no_device(self):
        with mock.patch.object(epilogue, "written_index", lambda index: -1):
            found = self.promises(self.value(state(2), device="cuda:1"))
        self.assertEqual(found.devices, (-1,))

    def test_they_are_part_of_cached_code(self):
        promises = Promises((0,), (2,), ((5, 1),), True)
        self.assertEqual(pickle.loads(pickle.dumps(promises)), promises)


class Object:
    """A stream or an event that says what is called."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, stream):
        self.log.append(f"{self.name} waits for {stream.name}")

    def record(self, stream):
        self.log.append(f"{self.name} on {stream.name}")

    def synchronize(self):
        self.log.append(f"the host waits for {self.name}")


class TestKeep(TestCase):
    def keep(self, *promises):
        log = []
        leave = objects.enter(*(Object(name, log) for name in ("c", "s1", "s2", "e3")))
        self.addCleanup(leave)
        current = lambda device: Object(f"current {device}", log)  # noqa: E731
        with mock.patch.object(objects, "callers_stream", current):
            Promises(*promises).keep()
        return log

    def test_streams_and_events(self):
        wanted = ["s1 waits for current 0", "s2 waits for current 0", "e3 on s1"]
        self.assertEqual(self.keep((0,), (1, 2), ((3, 1),), False), wanted)

    def test_host(self):
        wanted = ["e3 on c", "the host waits for current 0"]
        self.assertEqual(self.keep((0,), (), ((3, 0),), True), wanted)

    def test_several_devices(self):
        wanted = [
            "s1 waits for current 0",
            "s1 waits for current 1",
            "the host waits for current 0",
            "the host waits for current 1",
        ]
        self.assertEqual(self.keep((0, 1), (1,), (), True), wanted)
