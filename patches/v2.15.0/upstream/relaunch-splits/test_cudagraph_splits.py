# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.cudagraph_relaunch import partitions
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests, TestCase


FLOW = "control flow operator: torch.cond."


class Lowered(Exception):
    pass


class TestSplits(TestCase):
    def unsafe(self, *targets, policy=None):
        nodes = [torch.fx.Graph().call_function(target) for target in targets]
        with inductor_config.patch(cudagraph_policy=policy):
            return [is_cudagraph_unsafe_fx_node(node) for node in nodes]

    def test_operators(self):
        failed = {"aten::sin.default": "waits for the device"}
        targets = (
            torch.ops._c10d_functional.wait_tensor.default,
            torch.ops.higher_order.while_loop,
            torch.ops.aten.sin.default,
            torch.ops.aten.cos.default,
            torch.ops.aten._local_scalar_dense.default,
        )
        with mock.patch.object(partitions.split_off, "failed", lambda: failed):
            before = self.unsafe(*targets)
            found = self.unsafe(*targets, policy=RelaunchPolicy())
        self.assertEqual(before, [False, False, False, False, before[-1]])
        self.assertEqual(found, [True, True, True, False, before[-1]])

    def test_control_flow_takes_no_graph_from_the_rest(self):
        for policy, is_cut, expected in (
            (RelaunchPolicy(), True, None),
            (RelaunchPolicy(), False, FLOW),
            (None, True, FLOW),
        ):
            graph = SimpleNamespace(disable_cudagraphs_reason=FLOW)
            options = {"cudagraph_policy": policy, "graph_partition": is_cut}
            with (
                inductor_config.patch(options),
                V.set_graph_handler(graph),
                mock.patch.object(ir.Switch, "realize_input", side_effect=Lowered),
                self.assertRaises(Lowered),
            ):
                ir.Switch.create(None, [], [], is_cond=True)
            self.assertEqual(graph.disable_cudagraphs_reason, expected)


if __name__ == "__main__":
    run_tests()
