# Owner(s): ["module: inductor"]

import torch
from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
from torch._inductor.test_case import run_tests, TestCase
from torch._subclasses.fake_tensor import FakeTensorMode


class TestHostConstants(TestCase):
    def graph(self, return_constant):
        """x + ones, where ones is made on the CPU; it may be a result, too."""
        graph, mode = torch.fx.Graph(), FakeTensorMode()
        x = graph.placeholder("x")
        ones = graph.call_function(
            torch.ops.aten.full.default,
            ([], 1.0),
            {"dtype": torch.float32, "device": torch.device("cpu")},
        )
        total = graph.call_function(torch.ops.aten.add.Tensor, (x, ones))
        graph.output((total, ones) if return_constant else (total,))
        with mode:
            x.meta["val"] = torch.empty(4, device="cuda:0")
            ones.meta["val"] = torch.empty(())
            total.meta["val"] = torch.empty(4, device="cuda:0")
        return graph, ones

    def device_after(self, return_constant):
        graph, ones = self.graph(return_constant)
        mover = ConstructorMoverPass("cuda", allow_outputs=True, allow_inputs=True)
        mover(graph)
        return torch.device(ones.kwargs["device"]).type

    def test_returned_constant_stays_on_cpu(self):
        self.assertEqual(self.device_after(return_constant=True), "cpu")

    def test_other_constant_is_moved(self):
        self.assertEqual(self.device_after(return_constant=False), "cuda")


if __name__ == "__main__":
    run_tests()
