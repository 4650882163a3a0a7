# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._inductor import lowering  # noqa: F401  # what it changes is tested
from torch._inductor.cudagraph_relaunch import attention_seeds
from torch.testing._internal.common_utils import run_tests, TestCase


class TestAttention(TestCase):
    """The operators themselves have no kernel for the host, and raise."""

    def call(self, name, dropout):
        overload = getattr(torch.ops.aten, name).default
        self.seeds = torch.tensor(7), torch.tensor(8)
        x = torch.zeros(1, 1, 8, 8)
        known = {"dropout_p": dropout, "grad_input_mask": [True] * 4}
        known |= dict(zip(attention_seeds.SEEDS, self.seeds))
        known |= {"max_seqlen_q": 8, "max_seqlen_k": 8, "custom_mask_type": 0}
        known |= {"bias_requires_grad": False, "bias": None, "attn_bias": None}
        known |= {"cu_seqlens_q": None, "cu_seqlens_k": None}
        names = [
            a.name for a in overload._schema.arguments if not a.has_default_value()
        ]
        with self.assertRaises(NotImplementedError):
            overload(*[known.get(name, x) for name in names])

    def test_seeds_are_noted(self):
        for name in attention_seeds.OPERATORS:
            with attention_seeds.noted() as found:
                self.call(name, 0.5)
            self.assertEqual(found, {seed.data_ptr() for seed in self.seeds})

    def test_seeds_on_the_device(self):
        for name in attention_seeds.OPERATORS:
            for dropout, captures, moved in (
                (0.5, False, 2),
                (0.5, True, 0),
                (0.0, False, 0),  # nobody reads them
            ):
                with (
                    mock.patch.object(attention_seeds, "on_device", lambda seed: True),
                    mock.patch.object(
                        attention_seeds, "is_capturing", return_value=captures
                    ),
                    mock.patch.object(
                        attention_seeds, "to_host", side_effect=lambda seed: seed
                    ) as to_host,
                ):
                    self.call(name, dropout)
                self.assertEqual(to_host.call_count, moved)


if __name__ == "__main__":
    run_tests()
