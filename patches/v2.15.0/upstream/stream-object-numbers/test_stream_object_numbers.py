# Owner(s): ["module: dynamo"]

import contextlib
from unittest import mock

import torch
import torch._dynamo.test_case
from torch._dynamo.test_case import run_tests


def stream(stream_id, device=0):
    return torch.Stream(stream_id=stream_id, device_index=device, device_type=1)


class TestStreamObjectNumbers(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.zeros(2)
        self.graphs = []

    def compile(self, function):
        """Compile the function; its graphs are kept, and none of them runs."""

        def backend(gm, inputs):
            self.graphs.append(gm)
            return lambda *args: (args[-1].clone(),)

        return torch.compile(function, backend=backend, fullgraph=True)

    def waited_for(self):
        """Return for each graph the numbers of what the host waits for."""
        waits = ("streams.synchronize_event", "streams.synchronize_stream")
        return [
            [n.args[0] for n in gm.graph.nodes if str(n.target) in waits]
            for gm in self.graphs
        ]

    def test_event_with_two_names_has_one_number(self):
        @self.compile
        def compiled(first, second, third, x):
            for event in (first, second, third):
                event.synchronize()
            return x + 1

        event, other = torch.Event("cuda"), torch.Event("cuda")
        compiled(event, other, event, self.x)
        ((first, second, third),) = self.waited_for()
        self.assertEqual(first, third)
        self.assertNotEqual(first, second)
        compiled(other, event, other, self.x)
        self.assertEqual(len(self.graphs), 1)
        compiled(event, event, other, self.x)
        first, second, third = self.waited_for()[1]
        self.assertEqual(first, second)
        self.assertNotEqual(first, third)

    def test_callers_stream_has_one_number(self):
        @self.compile
        def compiled(stream, x):
            stream.synchronize()
            return x + 1

        current = stream(7)
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (torch.accelerator, "is_available", True),
                (torch.accelerator, "current_accelerator", torch.device("cuda")),
                (torch.accelerator, "current_stream", current),
                (torch._dynamo.utils, "get_current_stream", current),
                (torch._dynamo.guards, "get_current_stream", current),
            ):
                function = mock.Mock(return_value=value)
                stack.enter_context(mock.patch.object(owner, name, function))
            compiled(stream(7), self.x)
            compiled(stream(8), self.x)
            compiled(stream(7), self.x)
            compiled(stream(7, device=1), self.x)
        self.assertEqual(self.waited_for(), [[0], [1]])


if __name__ == "__main__":
    run_tests()
