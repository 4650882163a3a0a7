"""What the relaunch benchmark runs: one `Work` a row.

A `Work` is a step on fresh inputs, as a user's loop would run it, and can turn into replays of a graph made by hand,
which reads no new input, hands out no output, and checks nothing: the limit.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


DEVICE = "cuda"  # tests build rows on the host
SETS = 4  # of fresh inputs, which steps take in turn

Inputs = tuple[Any, ...]
Compile = Callable[[Any], Any]


@dataclasses.dataclass
class Work:
    """`body(*inputs)` is what a graph may hold; the optimizer runs after it, in eager."""

    body: Callable[..., Any]
    inputs: list[Inputs]
    optimizer: torch.optim.Optimizer | None = None
    by_hand: Callable[..., Any] | None = None  # the body of the graph made by hand, if it is another one
    note: str = ""
    drop_gradients: bool = True
    count: int = 0
    recorded: Any = None  # what the graph made by hand launches from and reads

    def step(self) -> Any:
        inputs = self.inputs[self.count % len(self.inputs)]
        self.count += 1
        outputs = self.body(*inputs)
        if self.optimizer is not None:
            self.optimizer.step()
            if self.drop_gradients:
                self.optimizer.zero_grad(set_to_none=True)
        return outputs

    def replay(self) -> None:
        """From now on steps replay a graph made by hand, on the first inputs."""
        from stream_rows import _graph  # pyrefly: ignore[missing-import]

        body = self.by_hand or self.body

        def once() -> None:
            if self.optimizer is not None:
                self.optimizer.zero_grad(set_to_none=True)
            body(*self.inputs[0])

        graph = _graph(once)
        # The graph holds neither the model nor the code of its kernels: without their last holder Dynamo would drop the
        # compiled code, Triton would unload the kernels, and a replay would crash in the driver.
        self.recorded = once
        # A replay writes gradients where the capture put them.
        self.body, self.drop_gradients = lambda *_: graph.replay(), False


# ---- rows


def inference(model: nn.Module, compile: Compile, inputs: list[Inputs], call: Callable[..., Any] | None = None) -> Work:
    model.eval()
    compiled = compile(call or model)
    return Work(compiled, inputs)


def training(model: nn.Module, compile: Compile, inputs: list[Inputs], loss: Callable[..., torch.Tensor]) -> Work:
    model.train()
    compiled = compile(loss)

    def body(*tensors: Any) -> torch.Tensor:
        value = compiled(*tensors)
        value.backward()
        return value.detach()

    return Work(body, inputs, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))


def tokens(vocabulary: int, *shape: int) -> list[Inputs]:
    return [(torch.randint(0, vocabulary, shape, device=DEVICE),) for _ in range(SETS)]


def llama_config(layers: int = 16, **more: Any) -> Any:
    """A Llama whose layers have a width of 1024."""
    import transformers as hf

    return hf.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
        **more,
    )


def _language_model(kind: str, train: bool, compile: Compile) -> Work:
    import transformers as hf

    models: dict[str, tuple[Any, Any, tuple[int, int], tuple[int, int]]] = {
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(use_cache=False), (1, 128), (4, 512)),
        "bert": (hf.BertForMaskedLM, hf.BertConfig(), (1, 128), (8, 128)),
        "llama": (hf.LlamaForCausalLM, llama_config(), (1, 64), (2, 512)),
    }
    cls, config, once, batch = models[kind]
    shape = batch if train else once
    with torch.device(DEVICE):
        model = cls(config).bfloat16()
    inputs = tokens(config.vocab_size, *shape)
    if train:
        return training(model, compile, inputs, lambda ids: model(input_ids=ids, labels=ids).loss)
    return inference(model, compile, inputs, lambda ids: model(input_ids=ids).logits)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = stride == 1 and channels == out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def plain_resnet50() -> nn.Module:
    """ResNet-50 as He et al. describe it, with the stride in the 3 x 3 convolution."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def _resnet50() -> tuple[nn.Module, str]:
    try:
        import timm  # pyrefly: ignore[missing-import]

        return timm.create_model("resnet50"), f"timm {timm.__version__}"
    except ImportError:
        return plain_resnet50(), "timm is not installed: the benchmark's own ResNet-50"


def _vision(train: bool, compile: Compile) -> Work:
    with torch.device(DEVICE):
        model, note = _resnet50()
    model = model.to(DEVICE, torch.bfloat16).to(memory_format=torch.channels_last)
    batch = 32 if train else 1
    images = [
        torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(SETS)
    ]
    if train:
        inputs: list[Inputs] = [(x, torch.randint(0, 1000, (batch,), device=DEVICE)) for x in images]
        work = training(model, compile, inputs, lambda x, y: nn.functional.cross_entropy(model(x).float(), y))
    else:
        work = inference(model, compile, [(x,) for x in images])
    work.note = note
    return work


def _mlp(compile: Compile) -> Work:
    with torch.device(DEVICE):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
        inputs: list[Inputs] = [(torch.randn(16384, 2048), torch.randn(16384, 2048)) for _ in range(SETS)]
    torch.set_float32_matmul_precision("high")
    return inference(model, compile, inputs, lambda x, y: (model(x[:, :256]) + y[:, :256]).sum(-1))


def _experts(compile: Compile) -> Work:
    from stream_rows import Experts  # pyrefly: ignore[missing-import]

    e = Experts()
    inputs: list[Inputs] = [(torch.randn_like(e.x),) for _ in range(SETS)]
    # The limit is the graph of the eager program: its branches are parallel.
    return Work(compile(e.eight_streams), inputs, by_hand=e.eight_streams)


class Decoder(nn.Module):
    """A small decoder whose layers write their caches in place, at the position that a tensor holds."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, length: int = 512, batch: int = 4) -> None:
        super().__init__()
        self.heads, self.width, self.length = heads, width, length
        self.embed = nn.Embedding(32000, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        for i in range(layers):
            shape = (batch, heads, length, width // heads)
            self.register_buffer(f"keys{i}", torch.zeros(shape))
            self.register_buffer(f"values{i}", torch.zeros(shape))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        batch, count, width = x.shape
        mask = torch.arange(self.length, device=x.device)[None, :] <= position[:, None]
        for i, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down)):
            q, k, v = (
                t.view(batch, count, self.heads, -1).transpose(1, 2)
                for t in qkv(nn.functional.layer_norm(x, (width,))).split(width, dim=-1)
            )
            keys, values = getattr(self, f"keys{i}"), getattr(self, f"values{i}")
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + out(y.transpose(1, 2).reshape(batch, count, width))
            x = x + down(nn.functional.gelu(up(nn.functional.layer_norm(x, (width,)))))
        return (x @ self.embed.weight.t()).argmax(-1)


def _decode(compile: Compile) -> Work:
    with torch.device(DEVICE):
        model = Decoder().bfloat16()
        tokens = [torch.randint(0, 32000, (4, 1)) for _ in range(16)]
        inputs: list[Inputs] = [(t, torch.tensor([i])) for i, t in enumerate(tokens)]
    return inference(model, compile, inputs)


def distinct(fn: types.FunctionType, name: str) -> types.FunctionType:
    """The same function with code of its own, so that Dynamo compiles it for itself."""
    code = fn.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


def _regions(compile: Compile, count: int = 32) -> Work:
    with torch.device(DEVICE):
        weights = [torch.randn(512, 512, dtype=torch.bfloat16) / 512**0.5 for _ in range(count)]
        inputs: list[Inputs] = [(torch.randn(128, 512, dtype=torch.bfloat16),) for _ in range(SETS)]

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x + torch.tanh(x @ w), (512,))

    blocks = [compile(distinct(block, f"block{i}")) for i in range(count)]

    def body(x: torch.Tensor) -> torch.Tensor:
        for f, w in zip(blocks, weights):
            x = f(x, w)
        return x

    return Work(body, inputs)


def _small(kernels: int, compile: Compile) -> Work:
    """So little that one might do without a graph: kernels that can't be fused, for their inputs have other sizes."""
    sets: list[Inputs] = [tuple(torch.randn(256 + 64 * i, device=DEVICE) for i in range(kernels)) for _ in range(SETS)]
    compiled = compile(lambda *xs: [x.sin() for x in xs])
    return Work(compiled, sets)


class Depths(nn.Module):
    """A model in which a router says for each layer whether the batch takes it."""

    def __init__(self, layers: int = 12, width: int = 1024) -> None:
        super().__init__()
        self.routers = nn.ParameterList(torch.randn(width) for _ in range(layers))
        self.up, self.gate = (nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, is_taken: bool = False) -> torch.Tensor:
        for router, up, gate, down in zip(self.routers, self.up, self.gate, self.down):

            def block(x: torch.Tensor, up: Any = up, gate: Any = gate, down: Any = down) -> torch.Tensor:
                y = nn.functional.layer_norm(x, x.shape[-1:])
                return x + down(nn.functional.silu(gate(y)) * up(y))

            x = block(x) if is_taken else torch.cond((x @ router).sum() > 0, block, torch.clone, (x,))
        return x


def _depths(are_inside: bool, compile: Compile) -> Work:
    if "torch_overlay" in sys.modules:
        from torch_overlay._inductor.relaunch import conditions

        conditions.ARE_INSIDE = are_inside
    with torch.device(DEVICE):
        model = Depths().bfloat16()
        inputs: list[Inputs] = [(torch.randn(64, 1024, dtype=torch.bfloat16),) for _ in range(SETS)]
    work = inference(model, compile, inputs)
    # The limit takes every layer: a graph made by hand can't choose.
    work.by_hand = torch.no_grad()(functools.partial(model, is_taken=True))
    return work


ROWS: dict[str, tuple[str, Callable[[Compile], Work]]] = {
    "gpt2": ("GPT-2, 1 x 128", functools.partial(_language_model, "gpt2", False)),
    "gpt2 training": ("GPT-2, 4 x 512", functools.partial(_language_model, "gpt2", True)),
    "bert": ("BERT, 1 x 128", functools.partial(_language_model, "bert", False)),
    "bert training": ("BERT, 8 x 128", functools.partial(_language_model, "bert", True)),
    "llama": ("Llama, 16 layers, 1 x 64", functools.partial(_language_model, "llama", False)),
    "llama training": ("Llama, 16 layers, 2 x 512", functools.partial(_language_model, "llama", True)),
    "resnet50": ("ResNet-50, 1 x 224 x 224", functools.partial(_vision, False)),
    "resnet50 training": ("ResNet-50, 32 x 224 x 224", functools.partial(_vision, True)),
    "mlp": ("MLP on 2 x 128 MiB of fresh inputs", _mlp),
    "experts": ("8 experts on 8 streams", _experts),
    "decode": ("decode step, KV cache in place, 12 layers", _decode),
    "depths": ("12 layers, each taken if its router says so", functools.partial(_depths, True)),
    "depths split off": ("the same, conditions split off", functools.partial(_depths, False)),
    "regions": ("32 regions", _regions),
    "one kernel": ("one small kernel", functools.partial(_small, 1)),
    "four kernels": ("four small kernels", functools.partial(_small, 4)),
}
