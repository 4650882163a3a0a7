"""Arguments of calls on streams and events that Dynamo refuses, with what is wrong; and a call that it traces."""

import threading

import torch
import torch._dynamo.test_case
from torch._dynamo.exc import Unsupported
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream
from torch_overlay import config


CALLS = [
    (lambda x, s, e: torch.cuda.current_stream("cpu"), "takes a CUDA device"),
    (lambda x, s, e: torch.cuda.current_stream(0, 1), "the one argument `device`"),
    (lambda x, s, e: torch.cuda.current_stream("gpu"), "does not know the device"),
    (lambda x, s, e: torch.cuda.set_stream(x), "takes a stream"),
    (lambda x, s, e: s.wait_stream(e), "wait_stream takes a stream"),
    (lambda x, s, e: s.wait_event(s), "wait_event takes an event"),
    (lambda x, s, e: s.wait_stream(), "wait_stream takes a stream"),
    (lambda x, s, e: e.record(x), "takes a stream, not a Tensor"),
    (lambda x, s, e: e.elapsed_time(s), "elapsed_time takes an event"),
    (lambda x, s, e: e.wait(s, s), "the one argument `stream`"),
    (lambda x, s, e: torch.Stream(device="cpu"), "Only streams of CUDA devices"),
    (lambda x, s, e: torch.Stream("cuda", -1), "device and priority"),
    (lambda x, s, e: torch.Stream("cuda", priority=x.sum()), "is known only at run time"),
    (lambda x, s, e: torch.Event(nothing=1), "The constructor fails"),
    (lambda x, s, e: torch.cuda.StreamContext(), "takes one stream"),
]


@instantiate_parametrized_tests
class TestRefusedArguments(torch._dynamo.test_case.TestCase):
    @parametrize("number", range(len(CALLS)))
    def test_is_refused(self, number):
        call, said = CALLS[number]
        current = stream(7)
        self.enterContext(accelerator(lambda device=None: current))
        self.enterContext(config.patch(streams=True))

        def function(x, side, event):
            made = call(x, side, event)
            return x + 1, made

        with self.assertRaisesRegex(Unsupported, said):
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2), stream(8), torch.Event("cuda"))


class TestFullGraph(torch._dynamo.test_case.TestCase):
    def test_number_of_the_thread_is_traced_without_streams(self):
        current = stream(7)
        self.enterContext(accelerator(lambda device=None: current))
        self.enterContext(config.patch(streams=True))
        compiled = torch.compile(lambda x: x + 1 if threading.get_ident() > 0 else x, backend="eager", fullgraph=True)
        self.assertEqual(compiled(torch.ones(2)), torch.full((2,), 2.0))
