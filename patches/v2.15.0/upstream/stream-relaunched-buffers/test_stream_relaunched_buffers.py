# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo._streams import registry
from torch._functorch._streams.facts import note_fact
from torch._functorch._streams.tokens import CALLER
from torch._inductor import config
from torch._inductor.cudagraph_relaunch import policy
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten


class TestBuffers(TestCase):
    def setUp(self):
        super().setUp()
        for forget in (numbering.reset_user_object_tracking, registry.reset):
            forget()
            self.addCleanup(forget)

    def reused(self, side, is_set):
        """How often the code of a chain of products uses a buffer again."""
        program = Program()
        x = program.input(64, 64)

        def product(a, b, stream=0):
            node = program.call(aten.mm.default, a, b, stream=stream)
            tokens = (CALLER,) if stream else ()
            note_fact(node, after=tokens, before=tokens)
            return node

        last = product(x, x)
        for _ in range(3):
            last = product(last, x)
        program.output(last, product(x, x, stream=side))
        options = {
            "triton.streams": True,
            "triton.fold_branches_below_us": 0.0,
            "cudagraph_policy": RelaunchPolicy() if is_set else None,
        }
        with (
            config.patch(options),
            mock.patch.object(policy, "own_buffers", lambda graph: True),
        ):
            text = program.generated()
        self.assertEqual("_region0" in text, side > 0)
        return text.count("# reuse")

    def test_code_with_streams(self):
        before = self.reused(1, is_set=False)
        self.assertGreater(before, 0)
        self.assertEqual(self.reused(1, is_set=True), before)

    def test_code_without_streams(self):
        self.assertGreater(self.reused(0, is_set=False), 0)
        self.assertEqual(self.reused(0, is_set=True), 0)


if __name__ == "__main__":
    run_tests()
