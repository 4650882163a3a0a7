"""`_dynamo.functions`: the current stream, `set_stream` and `synchronize` in a traced program."""

import torch
import torch._dynamo.test_case
from torch._dynamo.exc import Unsupported

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream, take_operations
from torch_overlay import config


class TestStreamFunctions(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.side, self.other = torch.ones(2), stream(8), stream(9)
        self.current = {device: stream(7, device) for device in range(2)}
        self.graphs = []  # of each, the operations and their streams
        self.left = []  # streams that code makes current

        def current(device=0):
            index = device.index if isinstance(device, torch.device) else device
            return self.current[index or 0]

        self.enterContext(accelerator(current, set_stream=self.left.append))
        self.enterContext(config.patch(streams=True))

    def compile(self, function):
        def backend(gm, inputs):
            self.graphs.append(take_operations(gm, with_tensors=True))
            return gm

        return torch.compile(function, backend=backend, fullgraph=True)

    def traced(self, function, *args):
        """Return the operations of the function's graph."""
        self.compile(function)(self.x, *args)
        return self.graphs.pop()

    def test_current_stream(self):
        def f(x, side, event):
            event.record(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                event.record(torch.cuda.current_stream(0))
                event.record(torch.cuda.current_stream(torch.device("cuda", 1)))
            event.record(torch.accelerator.current_stream("cuda:0"))
            return x + 1

        *records, _ = self.traced(f, self.side, torch.Event("cuda"))
        event, side, far = records[0][1], records[1][2], records[2][2]
        self.assertEqual([row[2] for row in records], [0, side, far, 0])
        self.assertEqual({row[:2] for row in records}, {("record_event", event)})
        self.assertEqual(len({0, side, far}), 3)

    def test_current_stream_that_is_returned_is_that_of_the_call(self):
        f = self.compile(lambda x: (x + 1, torch.cuda.current_stream()))
        self.assertIs(f(self.x)[1], self.current[0])
        self.current[0] = self.other
        self.assertIs(f(self.x)[1], self.other)
        self.assertEqual(len(self.graphs), 1)

    def test_comparison_guards_the_relation(self):
        @self.compile
        def f(x, side):
            return x + 1, side == torch.accelerator.current_stream()

        self.assertFalse(f(self.x, self.side)[1])
        self.current[0] = self.other
        self.assertFalse(f(self.x, stream(12))[1])
        self.assertEqual(len(self.graphs), 1)
        self.current[0] = self.side
        self.assertTrue(f(self.x, self.side)[1])
        self.current[0] = self.other
        self.assertTrue(f(self.x, self.other)[1])
        self.assertEqual(len(self.graphs), 2)

    def test_set_stream_and_back(self):
        def f(x, side):
            before = torch.cuda.current_stream()
            torch.cuda.set_stream(side)
            x = x + 1
            torch.cuda.set_stream(before)
            return x * 2

        self.assertEqual(self.traced(f, self.side), [("add", 1), ("mul", 0)])
        self.assertEqual(self.left, [])

    def test_set_stream_holds_beyond_the_frame(self):
        def f(x, side, other):
            torch.cuda.set_stream(side)
            x = x + 1
            with torch.cuda.stream(other):
                torch.cuda.set_stream(side)
            torch.cuda.set_stream(other)
            torch.cuda.set_stream(None)
            return x * 2

        found = self.traced(f, self.side, self.other)
        self.assertEqual(found, [("add", 1), ("mul", 2)])
        self.assertEqual(self.left, [self.other])

    def test_synchronize(self):
        def f(x):
            torch.cuda.synchronize()
            torch.accelerator.synchronize(1)
            torch.cuda.synchronize(device="cuda:0")
            return x + 1

        *found, _ = self.traced(f)
        devices = [("synchronize_device", "cuda", i) for i in (None, 1, 0)]
        self.assertEqual(found, devices)

    def test_arguments_that_are_wrong(self):
        for call, said in (
            (lambda x: torch.cuda.current_stream("cpu"), "takes a CUDA device"),
            (lambda x: torch.cuda.current_stream(0, 1), "the one argument `device`"),
            (lambda x: torch.cuda.current_stream("gpu"), "does not know the device"),
            (lambda x: torch.cuda.set_stream(x), "takes a stream"),
        ):
            with self.assertRaisesRegex(Unsupported, said):
                self.traced(call)
