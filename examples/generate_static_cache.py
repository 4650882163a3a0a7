"""A Hugging Face model that generates with a static cache: each decoding step is one relaunched CUDA graph.

A step reads one token, and writes a key and a value into the cache in place. Stock CUDA graphs need the cache at fixed
addresses; here it may be anywhere, and the second text, with a cache of its own, uses the graph of the first one.

    python examples/generate_static_cache.py

`generate(cache_implementation="static")` makes the same steps by itself. It asks after each token whether the text has
ended, so it needs a GPU; there the example compares its tokens with those of the loop below.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

import torch_overlay
from torch_overlay.testing import simulated_gpu


LENGTHS, NEW, LONGEST = (12, 20), 16, 128  # of prompts, of texts, of the cache
CONFIG = LlamaConfig(vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4)


def continued(model: Any, step: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The tokens after a prompt, which is read in eager; each further one is a call of the compiled step."""
    cache = StaticCache(config=CONFIG, max_cache_len=LONGEST)
    positions = torch.arange(LONGEST, device="cuda")[None]
    found = [model(prompt, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)]
    for n in range(prompt.shape[1], prompt.shape[1] + NEW - 1):
        logits = step(found[-1], past_key_values=cache, position_ids=positions[:, n : n + 1]).logits
        found.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(found, 1)


def main() -> None:
    simulated = not torch.cuda.is_available()
    with simulated_gpu() if simulated else nullcontext():
        model: Any = LlamaForCausalLM(CONFIG).eval().requires_grad_(False).bfloat16().cuda()
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        prompts = [torch.randint(1, CONFIG.vocab_size, (1, length), device="cuda") for length in LENGTHS]
        texts = [continued(model, step, prompt) for prompt in prompts]
        print(torch_overlay.coverage())
        if simulated:
            return
        settings = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "cache_implementation": "static"}
        for prompt, text in zip(prompts, texts):
            found = model.generate(prompt, compile_config=CompileConfig(mode="reduce-overhead"), **settings)
            print(f"generate makes the same tokens: {torch.equal(found[:, prompt.shape[1] :], text)}")


if __name__ == "__main__":
    main()
