"""A Hugging Face Llama block with a parallel branch on a side stream.

The block is transformers' own LlamaDecoderLayer with random weights. Beside it runs a shared expert, a gated MLP that
reads the same hidden states; the two meet again when their results are added, so the expert can fill the gaps that the
block leaves. The fork and the join are one event each.

    python examples/transformer_side_branch.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRotaryEmbedding

import torch_overlay  # noqa: F401


if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH = 4, 256
CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    num_key_value_heads=4,
    num_hidden_layers=1,
    attn_implementation="sdpa",  # pyrefly: ignore[unexpected-keyword]
)


class BlockWithSharedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = LlamaDecoderLayer(CONFIG, layer_idx=0)
        self.shared_expert = LlamaMLP(CONFIG)
        self.side = torch.cuda.Stream()

    def forward(self, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_event(current.record_event())
        with torch.cuda.stream(self.side):
            shared = self.shared_expert(hidden)
            done = self.side.record_event()
        out = self.block(hidden, position_embeddings=positions)
        current.wait_event(done)
        return out + shared


def make() -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
    """The block, and arguments for one call of it."""
    torch.manual_seed(0)
    block = BlockWithSharedExpert().to("cuda", torch.bfloat16).requires_grad_(False).eval()
    hidden = torch.randn(BATCH, LENGTH, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
    rotary = LlamaRotaryEmbedding(CONFIG).to("cuda")
    return block, (hidden, rotary(hidden, torch.arange(LENGTH, device="cuda")[None]))


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            block, args = make()
            compiled = compile_only(block, *args)
        print("No GPU: compiled only. Which operation runs on which stream, and what waits for what:\n")
        print(compiled.plans[0].table())
        return
    block, args = make()
    results = {}
    for name, function in (("eager", block), ("compiled", torch.compile(block, fullgraph=True))):
        for _ in range(10):
            results[name] = function(*args)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            function(*args)
        torch.cuda.synchronize()
        print(f"{name:10}{(time.perf_counter() - start) * 1e4:8.0f} µs a call")
    difference = (results["eager"] - results["compiled"]).abs().max().item()
    print(f"largest difference between the two: {difference:.2g}")


if __name__ == "__main__":
    main()
