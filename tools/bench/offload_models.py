"""The models of `offload.py`: GPT-2 medium and a Llama of 16 layers, as they are trained on one long sequence.

Their classes are Hugging Face's, with causal attention and no mask (it would be as large as the square of the length).
The head and the loss are ours, over chunks of the sequence, each computed again in the backward: the logits of a whole
sequence (50257 numbers a token, in two types, and their gradients) would be most of the memory, and no offload helps
there. Whoever trains on long sequences computes the loss this way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from relaunch_rows import llama_config  # pyrefly: ignore[missing-import]
from torch import nn
from torch.utils.checkpoint import checkpoint


LENGTHS = {"gpt2": 45056, "llama": 49152}
CHUNK = 4096  # tokens


def make(row: str, length: int, layers: int | None = None, device: str = "cuda") -> Trained:
    """In bfloat16, with random weights."""
    import transformers as hf
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *args, **kwargs: None)
    config: Any
    cls: Any
    if row == "gpt2":
        rates: Any = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = hf.GPT2Config(
            n_embd=1024, n_layer=layers or 24, n_head=16, n_positions=length, use_cache=False, **rates
        )
        cls = hf.GPT2Model
    else:
        config = llama_config(layers or 16, max_position_embeddings=length)
        cls = hf.LlamaModel
    config._attn_implementation = "causal"
    torch.manual_seed(0)
    with torch.device(device):
        body: Any = cls(config)  # pyrefly: ignore[bad-argument-type]
        return Trained(body, config.vocab_size).bfloat16().train()


class Trained(nn.Module):
    """Token ids of one sequence to the loss of predicting each next token."""

    def __init__(self, body: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(1024, vocabulary, bias=False)
        self.vocabulary = vocabulary

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.body(input_ids=ids)[0].flatten(0, 1)
        targets = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
        parts = [
            checkpoint(self.chunk_loss, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK))
        ]
        return torch.stack(parts).sum() / (ids.numel() - 1)

    def chunk_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")
