"""Stream contexts that a program enters and exits by hand."""

import contextlib
import types

import torch
import torch._dynamo.test_case
from torch._dynamo.exc import Unsupported

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream, take_operations
from torch_overlay import config


class TestManualContexts(torch._dynamo.test_case.TestCase):
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
        """Return the operations of the function's graph, with their streams."""
        self.compile(function)(self.x, *args)
        self.assertEqual(self.left, [])
        return self.graphs.pop()

    def test_exit_stack(self):
        def f(x, side, other):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.stream(side))
                x = x + 1
                stack.enter_context(other)
                x = x * 2
            return x - 3

        found = self.traced(f, self.side, self.other)
        self.assertEqual(found, [("add", 1), ("mul", 2), ("sub", 0)])

    def test_exit_stack_of_no_stream(self):
        def f(x, side):
            with contextlib.ExitStack() as stack:
                if side is None:
                    stack.enter_context(contextlib.nullcontext())
                else:
                    stack.enter_context(torch.cuda.stream(side))
                x = x + 1
            torch.cuda.current_stream().synchronize()
            return x * 2

        add, _, mul = self.traced(f, None)
        self.assertEqual((add, mul), (("add", None), ("mul", None)))
        add, _, mul = self.traced(f, self.side)
        self.assertEqual((add, mul), (("add", 1), ("mul", 0)))

    def test_calls_of_methods(self):
        def f(x, side):
            entered = side.__enter__()
            x = x + 1
            side.__exit__(None, None, None)
            context = torch.cuda.stream(side)
            nothing = context.__enter__()
            x = x * 2
            context.__exit__(None, None, None)
            return x - 3, entered is side, nothing is None

        compiled = self.compile(f)
        self.assertEqual(compiled(self.x, self.side)[1:], (True, True))
        self.assertEqual(self.graphs, [[("add", 1), ("mul", 1), ("sub", 0)]])

    def test_order_that_is_not_that_of_blocks(self):
        def f(x, side, other):
            before = torch.cuda.current_stream()
            first, second = torch.cuda.stream(side), torch.cuda.stream(other)
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            x = x + 1  # on the stream that was current before the first
            second.__exit__(None, None, None)
            x = x * 2  # on the one that was current before the second
            torch.cuda.set_stream(before)
            return x

        found = self.traced(f, self.side, self.other)
        self.assertEqual(found, [("add", 0), ("mul", 1)])

    def test_methods_of_the_class(self):
        def f(x, side):
            context = torch.cuda.stream(side)
            torch.cuda.StreamContext.__enter__(context)
            x = x + 1
            leave = types.MethodType(torch.cuda.StreamContext.__exit__, context)
            leave(None, None, None)
            return x * 2

        found = self.traced(f, self.side)
        self.assertEqual(found, [("add", 1), ("mul", 0)])

    def test_context_of_the_users_own(self):
        class OnSide:
            def __init__(self, side):
                self.context = torch.cuda.stream(side)

            def __enter__(self):
                self.context.__enter__()

            def __exit__(self, *exception):
                self.context.__exit__(*exception)

        def f(x, side):
            with OnSide(side):
                x = x + 1
            return x * 2

        found = self.traced(f, self.side)
        self.assertEqual(found, [("add", 1), ("mul", 0)])

    def test_context_that_is_open_where_the_graph_ends(self):
        def f(x, side):
            torch.cuda.stream(side).__enter__()
            return x + 1

        with self.assertRaisesRegex(Unsupported, "is open where the graph ends"):
            self.traced(f, self.side)

    def test_context_that_was_not_entered(self):
        def f(x, side):
            torch.cuda.stream(side).__exit__(None, None, None)
            return x + 1

        with self.assertRaisesRegex(Unsupported, "was not entered"):
            self.traced(f, self.side)
