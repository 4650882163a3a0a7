"""The rows of `shapes.py`: models of transformers with random weights, whose batch and length change at each step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
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


def drawn(
    batches: Callable[[random.Random], int], most: int, steps: int, times: float = 1.0, spread: float = 0.0
) -> list[tuple[int, int]]:
    """Return (batch, length) of batches of texts, whose lengths are drawn and padded to the longest. `times`: a text is
    so many of those that `LENGTHS` is from, give or take `spread` of it, for these are quantiles."""
    draw, found = random.Random(11), []
    for _ in range(steps):
        batch = batches(draw)
        lengths = [draw.choice(LENGTHS) for _ in range(batch)]
        if spread:
            lengths = [round(n * times * draw.uniform(1 - spread, 1 + spread)) for n in lengths]
        found.append((batch, min(most, max(lengths))))
    return found


def _longest(items: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return max(batch for batch, _ in items), max(length for _, length in items)


def _language(
    name: str, items: list[tuple[int, int]], warm: list[tuple[int, int]], repeats: bool, compile: Compile, pads: bool
) -> Row:
    torch.backends.cuda.enable_cudnn_sdp(repeats)  # see _training
    model = _model(name)
    longest = _longest(items)
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

    return Row(step, inputs, items, warm, repeats)


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


def _llama() -> Any:
    import transformers as hf
    from relaunch_rows import llama_config  # pyrefly: ignore[missing-import]

    config = llama_config()
    config.num_hidden_layers = 8
    config.max_position_embeddings = max(config.max_position_embeddings, DOCUMENT)
    with torch.device(DEVICE):
        return hf.LlamaForCausalLM(config).bfloat16()


def _training(build: Callable[[], Any], items: list[tuple[int, int]], cudnn: bool, compile: Compile, pads: bool) -> Row:
    """Batches of texts, padded to the longest of them. `cudnn`: attention may be cuDNN's, which takes 12 ms a call for
    each new length on an H200."""
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    longest = _longest(items)[1]

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

    warm = [(items[0][0], length) for length in (33, 50, 64, 72, longest // 8 * 8, longest // 8 * 8 - 3)]
    return Row(step, inputs, items, warm, repeats=False, kept=lambda value: value)


# Inductor has guards on batches of one, lengths that are multiples of 8, and sizes beyond which it fuses less.
WARM = [(7, 45), (9, 77), (1, 45), (1, 77)]
LONG = [(32, 512), (32, 509), (1, 512), (1, 509)]
DOCUMENT = 4000  # tokens of the longest
_TEXTS = drawn(lambda draw: 4, max(LENGTHS), 600)
ROWS: dict[str, Callable[[Compile, bool], Row]] = {
    "int constant": functools.partial(_numbers, int, False),
    "int": functools.partial(_numbers, int, True),
    "float constant": functools.partial(_numbers, float, False),
    "float": functools.partial(_numbers, float, True),
    "pointwise": _pointwise,
    "decode": _decode,
    "distilbert": functools.partial(_language, "distilbert", sizes(48), WARM, True),
    **{
        name: functools.partial(_language, name, sizes(100), WARM, False)
        for name in ("bert", "distilgpt2", "electra", "t5-small")
    },
    "llama training": functools.partial(_training, _llama, _TEXTS, True),
    "llama training flash": functools.partial(_training, _llama, _TEXTS, False),
    "fine-tuning": functools.partial(
        _training, functools.partial(_model, "distilbert"), drawn(lambda draw: 16, 512, 400, 0.5, 0.05), False
    ),
    "documents": functools.partial(_training, _llama, drawn(lambda draw: 1, DOCUMENT, 400, 4.0, 0.2), False),
    "encoding": functools.partial(
        _language, "bert", drawn(lambda draw: draw.randint(1, 32), 512, 400, 0.5, 0.05), [*WARM, *LONG], False
    ),
}
