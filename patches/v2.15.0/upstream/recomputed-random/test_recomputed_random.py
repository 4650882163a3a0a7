# Owner(s): ["oncall: pt2"]

import torch
import torch._dynamo
import torch.nn.functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


def dropout(y):
    return F.dropout(y, 0.5)


def bernoulli(y):
    return (y * torch.bernoulli(torch.full_like(y, 0.5))).sin()


def permutation(y):
    return y[:, torch.randperm(16)].sin()


def attention(y):
    y = y.view(1, 2, 8, 16)
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.5).view(16, 16)


def branch(y):
    return torch.cond(y.sum() > -1e9, dropout, torch.sin, (y,))


OPTIONS = [{"activation_memory_budget": budget} for budget in (0.5, 0.1, 0.0)]
OPTIONS.append({"aggressive_recomputation": True})


class TestRecomputedRandom(TestCase):
    def gradients(self, between, **options):
        torch._dynamo.reset()
        torch.manual_seed(1)
        inputs = [torch.randn(16, 16).requires_grad_() for _ in range(3)]
        with torch._functorch.config.patch(options):
            fn = torch.compile(
                lambda x, v, w: between(x @ v) @ w, backend="aot_eager", fullgraph=True
            )
            loss = fn(*inputs).sum()
            loss.backward()
        return [loss, *(x.grad for x in inputs)]

    @parametrize("between", (dropout, bernoulli, permutation, attention, branch))
    def test_same_numbers_in_backward(self, between):
        expected = self.gradients(between)
        for options in OPTIONS:
            self.assertEqual(self.gradients(between, **options), expected)

    def test_checkpoint_still_recomputes(self):
        def checkpointed(y):
            return torch.utils.checkpoint.checkpoint(dropout, y, use_reentrant=False)

        expected = self.gradients(checkpointed)
        for options in OPTIONS:
            self.assertEqual(self.gradients(checkpointed, **options), expected)


instantiate_parametrized_tests(TestRecomputedRandom)


if __name__ == "__main__":
    run_tests()
