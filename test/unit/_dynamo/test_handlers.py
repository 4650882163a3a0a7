"""`_dynamo.handlers`: methods of streams and events in a traced program."""

from unittest import mock

import torch
import torch._dynamo.test_case
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream, take_operations
from torch_overlay._dynamo import objects
from torch_overlay._dynamo.state import StreamState


class Event(torch.Event):
    """An event that answers without a device."""

    done, at = False, 0.0

    def query(self):
        return self.done

    def elapsed_time(self, end):
        return end.at - self.at


class TestStreamMethods(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.side, self.other = torch.ones(2), stream(8), stream(9)
        self.event, self.end = Event("cuda"), Event("cuda")
        self.graphs = []  # of each, the operations on streams
        self.current = stream(7)
        self.enterContext(accelerator(lambda device=None: self.current))
        # The state that frames have where streams are traced.
        owner, name = symbolic_convert, "SymbolicStreamState"
        self.enterContext(mock.patch.object(owner, name, StreamState))

    def compile(self, function):
        def backend(gm, inputs):
            self.graphs.append(take_operations(gm))
            return gm

        return torch.compile(function, backend=backend, fullgraph=True)

    def traced(self, function, *args):
        """Return the operations on streams of the function's graph."""
        self.compile(function)(self.x, *args)
        return self.graphs.pop()

    def test_what_orders_work(self):
        def f(x, side, other, event):
            side.wait_stream(other)
            other.wait_event(event)
            side.record_event(event)
            event.record(other)
            event.wait(side)
            side.synchronize()
            event.synchronize()
            return x + 1

        found = self.traced(f, self.side, self.other, self.event)
        (_, side, other), (_, event, _), *_ = found
        self.assertEqual(len({0, side, other, event}), 4)
        self.assertEqual(
            found,
            [
                ("wait_stream", side, other),
                ("wait_event", event, other),
                ("record_event", event, side),
                ("record_event", event, other),
                ("wait_event", event, side),
                ("synchronize_stream", side),
                ("synchronize_event", event),
            ],
        )

    def test_current_stream_without_an_argument(self):
        def f(x, event, side):
            event.record()
            with side:
                event.wait(None)
            return x + 1

        record, wait = self.traced(f, self.event, self.side)
        self.assertEqual(record, ("record_event", 1, 0))
        self.assertEqual(wait, ("wait_event", 1, 2))

    def test_arguments_by_name(self):
        def f(x, side, other, event):
            event.record(stream=other)
            event.wait(stream=side)
            return x + 1

        found = self.traced(f, self.side, self.other, self.event)
        names, events, streams = zip(*found)
        self.assertEqual(names, ("record_event", "wait_event"))
        self.assertEqual(len({0, *events, *streams}), 4)

    def test_event_that_record_event_makes(self):
        def f(x, side):
            done = side.record_event()
            done.wait()
            return x + 1

        (_, made, side), wait = self.traced(f, self.side)
        self.assertEqual(wait, ("wait_event", made, 0))
        self.assertNotEqual(made, side)

    def test_arguments_that_are_wrong(self):
        for call, said in (
            (lambda x, s, e: s.wait_stream(e), "wait_stream takes a stream"),
            (lambda x, s, e: s.wait_event(s), "wait_event takes an event"),
            (lambda x, s, e: s.wait_stream(), "wait_stream takes a stream"),
            (lambda x, s, e: e.record(x), "takes a stream, not a Tensor"),
            (lambda x, s, e: e.elapsed_time(s), "elapsed_time takes an event"),
            (lambda x, s, e: e.wait(s, s), "the one argument `stream`"),
        ):
            with self.assertRaisesRegex(Unsupported, said):
                self.traced(call, self.side, self.event)

    def test_what_the_run_knows(self):
        @self.compile
        def f(x, start, end):
            return x + 1, start.query(), start.elapsed_time(end)

        found = []
        for self.event.done, self.end.at in ((False, 1.5), (True, 4.0)):
            found.append(f(self.x, self.event, self.end)[1:])
        self.assertEqual(found, [(False, 1.5), (True, 4.0)])
        self.assertEqual(len(self.graphs), 1)

    def test_comparison_guards_which_streams_they_are(self):
        other = self.other

        @self.compile
        def f(x, side):
            return x + 1, side == side, side == other, side != other, side == 3

        self.assertEqual(f(self.x, self.side)[1:], (True, False, True, False))
        self.assertEqual(f(self.x, self.other)[1:], (True, True, False, False))
        self.assertEqual(f(self.x, self.side)[1:], (True, False, True, False))
        self.assertEqual(len(self.graphs), 2)

    def test_streams_that_the_frame_makes_are_compared_by_the_run(self):
        def f(x, side):
            made = torch.Stream("cuda")
            return x + 1, made == made, made == side, made is side

        with mock.patch.object(objects.Owned, "resolve", lambda owned: self.side):
            result = self.compile(f)(self.x, self.side)
        self.assertEqual(result[1:], (True, True, False))
        asked = [row for row in self.graphs.pop() if row[0] == "same_stream"]
        self.assertEqual(asked, [("same_stream", 1, 2)])

    def test_attributes(self):
        @self.compile
        def f(x, side, event):
            return x + 1, side.device, side.device_index, side.stream_id, event.device

        for side in (self.side, stream(5, 1)):
            found = f(self.x, side, self.event)[1:]
            eager = side.device, side.device_index, side.stream_id, self.event.device
            self.assertEqual(found, eager)

    def test_stream_as_a_key(self):
        @self.compile
        def f(x, table, side):
            return x + table[side]

        table = {self.side: 1, self.other: 2}
        self.assertEqual(f(self.x, table, self.side), self.x + 1)
        self.assertEqual(f(self.x, table, self.other), self.x + 2)

    def test_text(self):
        @self.compile
        def f(x, side):
            return x + 1, f"{side!r}"

        self.assertEqual(f(self.x, self.side)[1], repr(self.side))
