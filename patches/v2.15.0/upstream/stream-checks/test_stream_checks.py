# Owner(s): ["module: dynamo"]

import torch
import torch._dynamo.config
import torch._dynamo.test_case
from torch._dynamo.test_case import run_tests
from torch.testing._internal.accelerator_stand_in import accelerator, stream


class TestStreamChecks(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.side = torch.ones(2), stream(8)
        self.enterContext(accelerator(lambda device=None: stream(7)))
        self.enterContext(torch._dynamo.config.patch(streams=True))

    def traced(self, function, *args):
        """Return the operations of the function's graph, which doesn't run."""

        def backend(gm, inputs):
            self.targets = [
                str(node.target)
                for node in gm.graph.nodes
                if node.op in ("call_function", "call_method")
            ]
            return lambda *args: (self.x,)

        torch.compile(function, backend=backend, fullgraph=True)(*args)
        return [name for name in self.targets if name.startswith("streams.")]

    def test_tensor_that_is_deleted(self):
        def f(x, side):
            y = torch.empty(2, device="cuda")
            with torch.cuda.stream(side):
                z = y + 1
            del y
            return x + 1, z.shape

        self.assertEqual(self.traced(f, self.x, self.side), [])

    def test_element_that_is_deleted(self):
        def f(x, side):
            held = [torch.empty(2, device="cuda")]
            with torch.cuda.stream(side):
                z = held[0] + 1
            del held[0]
            return x + 1, z.shape

        self.assertEqual(self.traced(f, self.x, self.side), [])

    def test_event_after_a_mutation_of_an_input(self):
        def f(x, side, event):
            with torch.cuda.stream(side):
                x.add_(1)
                event.record()
            return x

        found = self.traced(f, self.x, self.side, torch.Event("cuda"))
        self.assertEqual(found, ["streams.record_event"])


if __name__ == "__main__":
    run_tests()
