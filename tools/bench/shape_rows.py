"""The rows of `shapes.py`: models of transformers with random weights, whose batch and length change at each step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn


DEVICE = "cuda"
Compile: TypeAlias = Callable[[Any], Any]

LENGTHS = tuple(map(int, (Path(__file__).parent / "lengths.txt").read_text().partition("\n")[2].split()))


@dataclass
class Row:
    """`step(*inputs(item))` is one step. `items` are what is measured, `warm` what runs before. With `repeats`, the
    items come again and again; else each comes once."""

    step: Callable[..., Any]
    inputs: Callable[[Any], list[Any]]
    items: list[Any]
    warm: list[Any]
    repeats: bool = True
    kept: Callable[[Any], Any] = field(default=lambda result: None)  # what of a step's result is compared


def sizes(count: int, most: int = 512, seed: int = 7) -> list[tuple[int, int]]:
    """Return different (batch, length), 1 to 32 and 16 to `most`, with at most 8192 tokens."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        batch, length = draw.choice((1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)), draw.randrange(16, most + 1)
        if batch * length <= 8192:
            found[batch, length] = None
    return list(found)


def _model(name: str) -> Any:
    from model_rows import _built, LANGUAGE, PAIRS  # pyrefly: ignore[missing-import]

    return _built((LANGUAGE | PAIRS)[name]).eval()


def _language(name: str, count: int, repeats: bool, compile: Compile, pads: bool) -> Row:
    model = _model(name)
    items = sizes(count)
    longest = max(batch for batch, _ in items), max(length for _, length in items)
    pair = name in ("t5-small", "bart")

    def forward(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        more = {"decoder_input_ids": ids} if pair else {}
        return model(input_ids=ids, attention_mask=mask, **more).logits

    compiled = compile(forward)

    def step(ids: torch.Tensor, mask: torch.Tensor) -> Any:
        with torch.no_grad():
            return compiled(ids, mask)

    def inputs(item: tuple[int, int]) -> list[torch.Tensor]:
        ids = torch.randint(0, 1000, item, device=DEVICE)
        mask = torch.ones_like(ids)
        if pads:
            grow = 0, longest[1] - item[1], 0, longest[0] - item[0]
            ids, mask = nn.functional.pad(ids, grow), nn.functional.pad(mask, grow)
        return [ids, mask]

    return Row(step, inputs, items, [(7, 45), (9, 77), (1, 45), (1, 77)], repeats)


def _layers(x: torch.Tensor, weights: list[torch.Tensor], n: Any) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ w) * 0.5 + n
    return x


def _numbers(kind: type, changes: bool, compile: Compile, pads: bool) -> Row:
    weights = [torch.randn(512, 512, device=DEVICE) / 23 for _ in range(24)]
    compiled = compile(_layers)

    def step(x: torch.Tensor, n: Any) -> torch.Tensor:
        return compiled(x, weights, n)

    values = [kind(3 + (k if changes else 0)) for k in range(48)]
    return Row(step, lambda n: [torch.randn(64, 512, device=DEVICE), n], values, [kind(100), kind(101)])


def _decode(compile: Compile, pads: bool) -> Row:
    """A decode loop whose position is a Python integer."""
    from relaunch_rows import Decoder  # pyrefly: ignore[missing-import]

    with torch.device(DEVICE):
        model = Decoder().bfloat16().eval()

    def token(ids: torch.Tensor, position: int) -> torch.Tensor:
        return model(ids, torch.arange(1, device=ids.device) + position)

    compiled = compile(token)

    def step(ids: torch.Tensor, position: int) -> Any:
        with torch.no_grad():
            return compiled(ids, position)

    return Row(step, lambda n: [torch.randint(0, 32000, (4, 1), device=DEVICE), n], list(range(8, 56)), [4, 5])


def _pointwise(compile: Compile, pads: bool) -> Row:
    """Kernels of Inductor's alone."""

    def body(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.softmax(nn.functional.layer_norm(x.sin(), (256,)), -1) + x
        return x

    compiled = compile(body)
    items = [17 * k + 5 for k in range(40, 88)]
    return Row(compiled, lambda n: [torch.randn(n, 256, device=DEVICE)], items, [100, 201])


def _training(compile: Compile, pads: bool, steps: int = 600, cudnn: bool = True) -> Row:
    """Llama, 8 layers, a batch of 4 texts, padded to the longest of them: lengths that are drawn. `cudnn`: attention
    may be cuDNN's, which takes 12 ms a call for each new length on an H200."""
    import transformers as hf
    from relaunch_rows import llama_config  # pyrefly: ignore[missing-import]

    config = llama_config()
    config.num_hidden_layers = 8
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    with torch.device(DEVICE):
        model = hf.LlamaForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    draw = random.Random(11)
    items = [(4, max(draw.choice(LENGTHS) for _ in range(4))) for _ in range(steps)]
    longest = max(LENGTHS)

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    compiled = compile(loss)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = compiled(ids, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def inputs(item: tuple[int, int]) -> list[torch.Tensor]:
        ids = torch.randint(0, 1000, item, device=DEVICE)
        labels = ids
        if pads:
            grow = 0, longest - item[1]
            ids, labels = nn.functional.pad(ids, grow), nn.functional.pad(ids, grow, value=-100)
        return [ids, labels]

    return Row(step, inputs, items, [(4, 33), (4, 50), (4, 64), (4, 72)], repeats=False, kept=lambda value: value)


ROWS: dict[str, Callable[[Compile, bool], Row]] = {
    "int constant": functools.partial(_numbers, int, False),
    "int": functools.partial(_numbers, int, True),
    "float constant": functools.partial(_numbers, float, False),
    "float": functools.partial(_numbers, float, True),
    "pointwise": _pointwise,
    "decode": _decode,
    "distilbert": functools.partial(_language, "distilbert", 48, True),
    "bert": functools.partial(_language, "bert", 100, False),
    "distilgpt2": functools.partial(_language, "distilgpt2", 100, False),
    "electra": functools.partial(_language, "electra", 100, False),
    "t5-small": functools.partial(_language, "t5-small", 100, False),
    "llama training": _training,
    "llama training flash": functools.partial(_training, cudnn=False),
}
