"""Regions where the C module is not built, and inside a capture on a GPU; the others are in `unit/csrc`."""

from unittest import mock

import torch
from torch._dynamo.test_case import TestCase

import form
from torch_overlay import config, csrc
from torch_overlay._inductor.streams import runtime


class TestNotBuilt(TestCase):
    def test_first_call_says_what_it_takes(self):
        error = csrc.NotBuiltError("the C module can't be built")
        one_device = runtime.region(device=0, streams=(-2,))
        with mock.patch.object(csrc, "extension", side_effect=error):
            for _ in range(2):
                with self.assertRaisesRegex(csrc.NotBuiltError, "can't be built"):
                    one_device.enter()


@form.needs_gpu
class TestCallersCapture(TestCase):
    def test_branches_and_waits(self) -> None:
        """Folded and unfolded branches, and waits for what a stream held before, inside torch.cuda.graph."""
        for limit in (0.0, 5.0):
            torch._dynamo.reset()
            stream = torch.cuda.Stream()

            def fork_join(x, stream=stream):
                current = torch.cuda.current_stream()
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    side = x.sin()
                current.wait_stream(stream)
                return side + x

            fn = torch.compile(fork_join, fullgraph=True)
            x = torch.randn(64, 64, device="cuda")
            with config.patch(fold_branches_below_us=limit):
                warm = torch.cuda.Stream()
                warm.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(warm):
                    for _ in range(3):
                        fn(x)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = fn(x)
            x.copy_(torch.randn(64, 64, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(result, x.sin() + x)
