# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
import torch._functorch.config
from functorch.compile import (
    aot_function,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._functorch._activation_offloading import candidates, decision, runtime
from torch._functorch._activation_offloading.cost_model import Link
from torch._functorch._activation_offloading.device_rates import Rates
from torch._functorch._activation_offloading.ops import LOAD, STORE
from torch.fx.traceback import preserve_node_meta
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import CheckpointPolicy


aten = torch.ops.aten
FAST = Rates(Link(1e6, 1e6, 0.0), 1e3, 1e9, False)
LAYERS = 4


def chain(x, w):
    for _ in range(LAYERS):
        x = (x @ w).sin()
    return x


class TestOffloadSaved(TestCase):
    """Programs on the host, which stands for the device and has no pinned memory."""

    def setUp(self):
        super().setUp()
        for patch in (
            mock.patch.object(candidates, "DEVICE_TYPE", "cpu"),
            mock.patch.object(decision, "rates", lambda index: FAST),
            mock.patch.object(Rates, "flops_of", lambda *args: FAST.flops),
            mock.patch.object(
                runtime.pinned_memory, "available_bytes", lambda: 1 << 40
            ),
            mock.patch.object(runtime, "take_slab", self.take),
            mock.patch.object(runtime, "note_use", lambda slab: None),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def take(self, nbytes, device, strict):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def offloaded(self, marks=None, **options):
        """What the forward stores and the backward loads; checks the gradients. The
        metadata of the first products has `marks`."""
        graphs = []

        def compiler(gm, _):
            graphs.append(gm.graph)
            return make_boxed_func(gm.forward)

        def mark(gm, _):
            products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
            for node in products[:LAYERS]:
                node.meta |= marks or {}
            return gm

        run = aot_function(
            chain,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
        )
        inputs = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
        options = {"stream_placement": True, "joint_custom_pass": mark, **options}
        with torch._functorch.config.patch(options), preserve_node_meta():
            gradients = torch.autograd.grad(run(*inputs).sum(), inputs)
        self.assertEqual(gradients, torch.autograd.grad(chain(*inputs).sum(), inputs))
        forward, backward = graphs
        stores = forward.find_nodes(op="call_function", target=STORE)
        loads = backward.find_nodes(op="call_function", target=LOAD)
        self.assertEqual(len(stores), len(loads))
        return [store.args[1].target for store in stores]

    def test_budget(self):
        budget = {"budget_gb": 1e-4, "min_bytes": 0}
        stored = self.offloaded(activation_offload=budget)
        self.assertTrue(stored)
        self.assertLess(len(stored), LAYERS)
        budget["budget_gb"] = 1
        self.assertEqual(self.offloaded(activation_offload=budget), [])

    def test_nothing_asks(self):
        self.assertEqual(self.offloaded(), [])

    def test_checkpoint_policy(self):
        policy = {"recompute": CheckpointPolicy.MUST_CPU_OFFLOAD}
        self.assertEqual(self.offloaded(policy), [aten.mm.default] * LAYERS)

    def test_marks_of_a_pass(self):
        found = self.offloaded(
            {"should_offload": True, "recompute": CheckpointPolicy.MUST_SAVE},
            enable_activation_offloading=True,
            activation_offload_separate_stream=True,
        )
        self.assertEqual(found, [aten.mm.default] * LAYERS)

    def test_option_that_needs_placement(self):
        with self.assertRaisesRegex(ValueError, "activation_offload needs .*placement"):
            self.offloaded(stream_placement=False, activation_offload={"budget_gb": 1})


if __name__ == "__main__":
    run_tests()
