# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._functorch._activation_offloading.ops import LOAD, SLAB, STORE
from torch._inductor.activation_offloading.codegen import is_load, is_store
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.cudagraph_utils import CUDAGraphPolicy
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten
CUDA = torch.device("cuda:0")
CUT = "cross-device ops"


class TestPartitions(TestCase):
    def reasons(self, **options):
        """Why the code is cut at a store, at a load, at a copy that the program
        makes, and where a slab is taken."""
        program = Program()
        x = program.input(4, 4)
        slab = program.call(SLAB, 1024, 0, True)
        program.call(STORE, slab, program.call(aten.mm.default, x, x), 0)
        loaded = program.call(LOAD, slab, 0, [4, 4], [4, 1], torch.float32, CUDA)
        h = program.input(4, 4, device="cpu")
        copy = program.call(torch.ops.prims.device_put.default, h, CUDA)
        program.output(loaded, copy)
        options = {"triton.cudagraphs": True, "triton.streams": True} | options
        with program.scheduled() as scheduler, inductor_config.patch(options):
            found = {}
            for node in scheduler.nodes:
                kind = "store" if is_store(node) else "load" if is_load(node) else None
                kind = kind or type(node.node).__name__
                found[kind] = scheduler.should_partition(node)
        return [
            found[kind] for kind in ("store", "load", "DeviceCopy", "FallbackKernel")
        ]

    def test_copies_stay_in_a_graph(self):
        store, load, copy, slab = self.reasons(cudagraph_policy=RelaunchPolicy())
        self.assertEqual((store, load, copy), (None, None, CUT))
        self.assertIsNotNone(slab)

    def test_graphs_of_others(self):
        for policy in (None, CUDAGraphPolicy()):
            store, load, copy, _ = self.reasons(cudagraph_policy=policy)
            self.assertEqual((store, load, copy), (CUT, CUT, CUT))


if __name__ == "__main__":
    run_tests()
