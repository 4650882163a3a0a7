# Owner(s): ["module: dynamo"]

from unittest import mock

import torch
import torch._dynamo.test_case
from torch._dynamo import config
from torch._dynamo._streams import objects
from torch._dynamo.test_case import run_tests
from torch.testing._internal.accelerator_stand_in import accelerator, stream


class TestStreamTracing(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        # The current stream, as the two kinds of streams that PyTorch has.
        self.cuda, self.plain = stream(7), stream(7)
        self.accelerator = torch.device("cuda")
        self.tables = []
        self.enterContext(accelerator(lambda device=None: self.plain))
        for owner, name, function in (
            (torch.accelerator, "current_accelerator", lambda: self.accelerator),
            (objects, "callers_stream", lambda device: self.cuda),
        ):
            self.enterContext(mock.patch.object(owner, name, function))

    def table(self):
        """Return the objects that a graph is passed."""

        def backend(gm, inputs):
            def run(x):
                self.tables.append(objects.current())
                return (x.clone(),)

            return run

        @torch.compile(backend=backend, fullgraph=True)
        def compiled(x, side):
            side.synchronize()
            return x + 1

        torch._dynamo.reset()
        side = stream(8)
        compiled(torch.zeros(2), side)
        callers, other = self.tables.pop()
        self.assertIs(other, side)
        return callers

    def test_callers_stream_is_a_cuda_stream(self):
        with config.patch(streams=True):
            self.assertIs(self.table(), self.cuda)

    def test_callers_stream_without_the_option(self):
        self.assertFalse(config.streams)
        self.assertIs(self.table(), self.plain)

    def test_callers_stream_of_another_accelerator(self):
        self.accelerator = torch.device("xpu")
        with config.patch(streams=True):
            self.assertIs(self.table(), self.plain)


if __name__ == "__main__":
    run_tests()
