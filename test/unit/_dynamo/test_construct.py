"""Streams and events that a traced program constructs: arguments, guards, identity."""

from unittest import mock

import torch
import torch._dynamo.test_case
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.ctx_manager import CUDADeviceVariable

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream
from torch_overlay._dynamo import registry
from torch_overlay._dynamo.state import StreamState


class TestStreamConstruct(torch._dynamo.test_case.TestCase):
    """There is no device, so a stream that was made would be an error."""

    def setUp(self):
        super().setUp()
        self.x, self.device = torch.ones(2), 0
        self.described = []  # the objects of each frame, without the current stream
        current = stream(7)
        self.enterContext(accelerator(lambda device=None: current, lambda: self.device))
        for name in ("_exchange_fn", "_maybe_exchange_fn"):
            exchange = staticmethod(lambda index: 0)
            self.enterContext(mock.patch.object(CUDADeviceVariable, name, exchange))
        # The state that frames have where streams are traced.
        owner, name = symbolic_convert, "SymbolicStreamState"
        self.enterContext(mock.patch.object(owner, name, StreamState))

    def compile(self, function):
        def backend(gm, inputs):
            self.described.append(registry.describe()[1:])
            self.streams = {
                node.meta.get("custom", {}).get("stream")
                for node in gm.graph.nodes
                if isinstance(node.meta.get("example_value"), torch.Tensor) and node.op == "call_function"
            }
            gm.graph.eliminate_dead_code()  # the streams are not needed
            gm.recompile()
            return gm

        return torch.compile(function, backend=backend, fullgraph=True)

    def test_stream_that_nobody_else_sees(self):
        @self.compile
        def f(x):
            side = torch.Stream(device="cuda:0", priority=-1)
            with side:
                return x + 1

        for _ in range(2):
            self.assertEqual(f(self.x), self.x + 1)
        ((made,),) = self.described
        self.assertEqual((made.origin, made.escapes), ("frame", False))
        self.assertEqual((made.kind, made.priority), ("stream", -1))
        self.assertEqual(made.device, torch.device("cuda", 0))
        self.assertEqual(self.streams, {made.index})

    def test_streams_are_different(self):
        @self.compile
        def f(x):
            first, second = torch.Stream("cuda"), torch.Stream("cuda")
            with first:
                x = x + 1
            with second:
                return x * 2

        f(self.x)
        self.assertEqual(self.streams, {1, 2})

    def test_stream_of_the_current_device(self):
        @self.compile
        def f(x):
            with torch.Stream():
                return x + 1

        self.device = 2
        f(self.x)
        ((made,),) = self.described
        self.assertEqual(made.device, torch.device("cuda", 2))

    def test_event_that_is_returned_is_another_one_at_each_call(self):
        @self.compile
        def f(x):
            return x + 1, torch.Event("cuda", enable_timing=True)

        first, second = f(self.x)[1], f(self.x)[1]
        self.assertIsNot(first, second)
        self.assertIs(type(first), torch.Event)
        ((made,),) = self.described
        self.assertEqual((made.kind, made.timing), ("event", True))

    def test_argument_of_the_caller_is_guarded(self):
        @self.compile
        def f(x, priority):
            with torch.Stream("cuda", priority=priority):
                return x + 1

        for priority in (-1, 0, -1):
            f(self.x, priority)
        found = [made.priority for (made,) in self.described]
        self.assertEqual(found, [-1, 0])

    def test_argument_that_only_the_run_knows(self):
        def f(x):
            with torch.Stream("cuda", priority=x.sum()):
                return x + 1

        with self.assertRaisesRegex(Unsupported, "is known only at run time"):
            self.compile(f)(self.x)

    def test_arguments_that_are_wrong(self):
        for make, said in (
            (lambda: torch.Stream(device="cpu"), "Only streams of CUDA devices"),
            (lambda: torch.Stream("cuda", -1), "device and priority"),
            (lambda: torch.Event(nothing=1), "The constructor fails"),
        ):
            with self.assertRaisesRegex(Unsupported, said):
                self.compile(lambda x, make=make: (x + 1, make()))(self.x)

    def test_class_of_contexts(self):
        @self.compile
        def f(x, side):
            with torch.cuda.StreamContext(side):
                return x + 1

        f(self.x, stream(9))
        self.assertEqual(self.streams, {1})
        with self.assertRaisesRegex(Unsupported, "takes one stream"):
            self.compile(lambda x: torch.cuda.StreamContext() or x)(self.x)

    def test_device_of_a_tensor_of_the_host(self):
        @self.compile
        def f(x, side):
            with torch.cuda.device_of(x), side:
                return x + 1

        self.assertEqual(f(self.x, stream(9)), self.x + 1)
        self.assertEqual(self.streams, {1})
