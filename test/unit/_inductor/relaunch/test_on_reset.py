"""`_inductor.relaunch.on_reset`: listeners hear of each reset of Dynamo once."""

from unittest import mock

import torch
from torch._dynamo.eval_frame import cached_backends
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._inductor.relaunch import on_reset as module
from torch_overlay._inductor.relaunch.on_reset import listen, on_reset


class TestReset(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.enterContext(mock.patch.object(module, "_forgetting", []))
        self.calls = []

    def tearDown(self):
        torch._dynamo.reset()
        super().tearDown()

    def test_all_are_called(self):
        @on_reset
        def first():
            self.calls.append("first")

        on_reset(lambda: self.calls.append("second"))
        torch._dynamo.reset()
        self.assertEqual(self.calls, [])  # nobody listened
        listen()
        torch._dynamo.reset()
        self.assertEqual(self.calls, ["first", "second"])
        torch._dynamo.reset()  # there was nothing new
        self.assertEqual(self.calls, ["first", "second"])
        listen()
        torch._dynamo.reset()
        self.assertEqual(self.calls, ["first", "second"] * 2)
        self.assertEqual(first(), None)

    def test_listening_twice(self):
        on_reset(lambda: self.calls.append("forgotten"))
        before = len(cached_backends)
        listen()
        listen()
        self.assertEqual(len(cached_backends), before + 1)
        torch._dynamo.reset()
        self.assertEqual(self.calls, ["forgotten"])

    def test_code_compiled_meanwhile(self):
        on_reset(lambda: self.calls.append("forgotten"))
        seen = []

        def backend(graph, inputs):
            seen.append("compiled")
            listen()
            return graph.forward

        compiled = torch.compile(lambda x: x + 1, backend=backend)
        for _ in range(2):
            self.assertEqual(compiled(torch.ones(2)), torch.full((2,), 2.0))
            torch._dynamo.reset()
        self.assertEqual((len(seen), len(self.calls)), (2, 2))
