# Owner(s): ["module: aotdispatch"]

import torch
from torch._dynamo.test_case import run_tests, TestCase
from torch._functorch._aot_autograd.runtime_wrappers import (
    _AnalyzeCustomOpInputOutputMode,
)


class TestWrappedNumbers(TestCase):
    def test_saved_number_has_an_item(self):
        for number in (2, 0.5):
            product = torch.ones(1, requires_grad=True) * number
            saved = product.grad_fn._saved_other
            with _AnalyzeCustomOpInputOutputMode():
                self.assertEqual(saved.item(), number)

    def test_tensor_has_an_item(self):
        with _AnalyzeCustomOpInputOutputMode():
            self.assertEqual(torch.tensor(3).item(), 3)


if __name__ == "__main__":
    run_tests()
