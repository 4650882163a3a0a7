# Owner(s): ["module: inductor"]

import re
from unittest import mock

import torch
from torch._functorch._activation_offloading import runtime
from torch._functorch._activation_offloading.ops import IN_USE, LOAD, SLAB, STORE
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
CALL = re.compile(r"(?:\w+ = )?(?:take_slab|copy_out|note_use|copy_in)\(.*\)")
IMPORT = "from torch._functorch._activation_offloading.runtime import "


class OffloadCodegenTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.call = self.program.call

    def generated(self, *results):
        self.program.output(*results)
        with self.program.scheduled() as scheduler:
            self.ask(scheduler.nodes)
            scheduler.codegen()
            code, _ = V.graph.wrapper_code.generate(is_inference=True)
        return code.value

    def ask(self, nodes):
        """What a test asks of the scheduler's nodes."""


class TestCode(OffloadCodegenTestCase):
    def test_stores(self):
        x, w = self.program.input(8, 16), self.program.input(16, 4)
        slab = self.call(SLAB, 2048, 0, True)
        product = self.call(aten.mm.default, x, w)
        self.call(STORE, slab, product, 0)
        self.call(STORE, slab, self.call(aten.permute.default, x, [1, 0]), 512)
        text = self.generated(slab)
        self.assertEqual(
            CALL.findall(text),
            [
                "buf0 = take_slab(2048, 0, True)",
                "copy_out(buf0, buf1, 0)",
                "copy_out(buf0, reinterpret_tensor(x0, (16, 8), (1, 16), 0), 512)",
            ],
        )
        self.assertEqual(text.count(IMPORT), 1)

    def test_load(self):
        slab = self.program.input(2048, device="cpu", dtype=torch.uint8)
        self.call(IN_USE, slab)
        args = 512, [4, 8], [1, 4], torch.float32, CUDA
        loaded = self.call(LOAD, slab, *args)
        product = self.call(aten.mm.default, self.program.input(2, 4), loaded)
        text = self.generated(product)
        self.assertEqual(CALL.findall(text), ["note_use(x0)", "copy_in(buf1, x0, 512)"])
        self.assertIn("buf1 = empty_strided_cuda((4, 8), (1, 4), torch.float32)", text)
        self.assertLess(text.index("copy_in(buf1"), text.index("extern_kernels.mm"))

    def test_load_that_nobody_reads(self):
        slab = self.program.input(2048, device="cpu", dtype=torch.uint8)
        self.call(LOAD, slab, 0, [4], [1], torch.float32, CUDA)
        x = self.program.input(4, 4)
        text = self.generated(self.call(aten.mm.default, x, x))
        self.assertEqual(CALL.findall(text), [])

    def test_program_without_copies(self):
        x = self.program.input(4, 4)
        text = self.generated(self.call(aten.mm.default, x, x))
        self.assertNotIn(IMPORT, text)


class TestQueries(OffloadCodegenTestCase):
    def ask(self, nodes):
        from torch._inductor.activation_offloading.codegen import (
            is_copy,
            is_load,
            is_store,
        )

        self.found = [(is_load(n), is_store(n), is_copy(n)) for n in nodes]

    def test_of_nodes(self):
        slab = self.call(SLAB, 1024, 0, True)
        x = self.program.input(4, 4)
        self.call(STORE, slab, self.call(aten.mm.default, x, x), 0)
        loaded = self.call(LOAD, slab, 0, [4, 4], [4, 1], torch.float32, CUDA)
        self.generated(loaded)
        copies = {(True, False, True), (False, True, True)}
        self.assertEqual(set(self.found), copies | {(False, False, False)})
        self.assertEqual(len(self.found), 4)


class TestValues(OffloadCodegenTestCase):
    def test_what_is_stored_comes_back(self):
        """The code runs on the CPU."""
        x = self.program.input(8, 4, device="cpu")
        w = self.program.input(4, 3, device="cpu")
        slab = self.call(SLAB, 2048, 0, True)
        product = self.call(aten.mm.default, x, w)
        turned = self.call(aten.permute.default, product, [1, 0])
        self.call(STORE, slab, turned, 1024)
        self.call(STORE, slab, w, 0)
        self.call(IN_USE, slab)
        back = self.call(LOAD, slab, 1024, [3, 8], [1, 3], torch.float32, CPU)
        w_back = self.call(LOAD, slab, 0, [4, 3], [3, 1], torch.float32, CPU)
        result = self.call(aten.mm.default, w_back, back)
        module: dict = {}
        taken = []

        def take(*args):
            taken.append(args)
            return torch.zeros(2048, dtype=torch.uint8)

        with (
            mock.patch.object(runtime, "take_slab", take),
            mock.patch.object(runtime, "note_use", taken.append),
        ):
            exec(self.generated(result, back), module)
            x, w = torch.randn(8, 4), torch.randn(4, 3)
            result, back = module["call"]([x, w])
        self.assertEqual(back, (x @ w).t())
        self.assertEqual(back.stride(), (1, 3))
        self.assertEqual(result, w @ (x @ w).t())
        self.assertEqual(taken[0], (2048, 0, True))
        self.assertEqual(len(taken), 2)


if __name__ == "__main__":
    run_tests()
