"""`_dynamo.state`: the current streams of several devices, and their numbers."""

import torch
import torch._dynamo.test_case
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.variables.streams import StreamVariable
from torch._guards import tracing, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream
from torch_overlay._dynamo import registry, state


class Translator:
    """Stands for the translator of a frame, and for its output."""

    def __init__(self):
        self.output, self.graph = self, torch.fx.Graph()

    def create_proxy(self, kind, target, args, kwargs):
        return torch.fx.Proxy(self.graph.create_node(kind, target, args, kwargs))


class TestStreamState(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        for forget in (numbering.reset_user_object_tracking, registry.reset):
            forget()
            self.addCleanup(forget)
        self.callers = {device: stream(10 + device, device) for device in range(3)}
        self.device = 1
        self.enterContext(
            accelerator(lambda d=None: self.callers[self.device if d is None else d], lambda: self.device)
        )
        self.enterContext(tracing(TracingContext(FakeTensorMode())))
        self.tx, self.state = Translator(), state.StreamState()

    def current(self, *args, **kwargs):
        return self.state.current(self.tx, *args, **kwargs)

    def stream(self, stream_id, device=1):
        """Return a variable of a stream that the frame has."""
        value = stream(stream_id, device)
        return StreamVariable(None, value, registry.add_owned(value, torch.Stream, (), {}))

    def test_callers_stream_of_another_device_has_a_number(self):
        own = self.stream(1)
        other, plain = self.current(2), self.current(2, base=True)
        self.device = 2
        self.assertIs(self.current(), other)
        self.assertEqual([v.user_object_index for v in (own, other, plain)], [1, 2, 2])
        self.assertEqual([info.origin for info in registry.facts().objects], ["current", "frame", "current"])

    def test_context_changes_the_stream_of_its_device(self):
        first, second, other = self.stream(1), self.stream(2), self.stream(3, 2)
        for pushed, currents in ((first, [first, None]), (other, [first, other]), (second, [second, other])):
            self.state.enter_stream(pushed)
            found = [self.current(1), self.current(2)]
            self.assertEqual([v if v in (first, second, other) else None for v in found], currents)
        for _ in range(3):
            self.state.exit_stream()
        self.assertEqual([self.current(d).value for d in (1, 2)], [self.callers[d] for d in (1, 2)])
