# Owner(s): ["module: inductor"]

import torch
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten


class TestKernelComments(TestCase):
    def generated(self, **options):
        """The lines that launch kernels, and comments on them."""
        program = Program()
        x = program.input(64, 64)
        product = program.call(aten.mm.default, x, x)
        product.meta["stack_trace"] = 'File "/a/model.py", line 41, in f\n    x @ x'
        product.meta["nn_module_stack"] = {"0": ("L['self'].layers.0", torch.nn.Linear)}
        sine = program.call(aten.sin.default, product)
        sine.meta["stack_trace"] = 'File "/a/model.py", line 42, in f\n    y.sin()'
        program.output(sine)
        with config.patch(options):
            text = program.generated()
        lines = [line.strip() for line in text.splitlines()]
        shown = "# Kernel of", "extern_kernels.", "triton_poi_fused_0.run"
        return [line.partition("(")[0] for line in lines if line.startswith(shown)]

    def test_lines_and_modules(self):
        wanted = [
            "# Kernel of model.py:41, layers.0",
            "extern_kernels.mm",
            "# Kernel of model.py:42",
            "triton_poi_fused_0.run",
        ]
        self.assertEqual(self.generated(**{"triton.nvtx": True}), wanted)

    def test_functions_of_partitions(self):
        options = {"triton.cudagraphs": True, "graph_partition": True}
        found = self.generated(**{"triton.nvtx": True, **options})
        self.assertEqual([line.startswith("# Kernel of") for line in found], [1, 0] * 2)

    def test_option_is_off(self):
        wanted = ["extern_kernels.mm", "triton_poi_fused_0.run"]
        self.assertEqual(self.generated(), wanted)


if __name__ == "__main__":
    run_tests()
