"""The programs of `clients.py`: loops that people write around unmodified libraries, with random weights and made-up
data, so that nothing is downloaded.

A row is a function that gets a `Use` (how its process compiles, and where) and returns a `Client`. It imports its
library itself: a library that isn't there costs its own rows. On the host all sizes are small.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn


if TYPE_CHECKING:
    from pathlib import Path

Tensors = Iterable[torch.Tensor]


@dataclasses.dataclass
class Client:
    """`step` makes `steps` steps, and returns the tensors that it computed, such as losses, outputs or tokens; `state`
    returns those that the steps change, such as parameters. Inputs repeat after `cycle` calls."""

    step: Callable[[], Tensors]
    state: Callable[[], Tensors] = tuple
    steps: int = 1
    cycle: int = 1
    loop: Callable[[], float] | None = None


@dataclasses.dataclass
class Use:
    """How a side runs a client. `folder` is an empty one of its own."""

    device: str
    graphs: bool
    folder: Path

    @property
    def mode(self) -> str:
        return "reduce-overhead" if self.graphs else "default"

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, mode=self.mode, **options)

    def size(self, gpu: int, host: int) -> int:
        return gpu if self.cuda else host

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16)


Row = Callable[[Use], Client]
ROWS: dict[str, Row] = {}
LIBRARIES: dict[str, tuple[str, ...]] = {}  # row -> modules that it imports beside torch


def client(name: str, *libraries: str) -> Callable[[Row], Row]:
    """Register a row. The libraries are imported before anything is timed."""

    def register(build: Row) -> Row:
        if name in ROWS:
            raise ValueError(f"a second row {name!r}")
        ROWS[name], LIBRARIES[name] = build, libraries
        return build

    return register


def library(name: str) -> Any:
    """A module that only the processes of its rows need."""
    return importlib.import_module(name)


def turns(items: Iterable[Any]) -> Callable[[], Any]:
    """The items in turn, for ever."""
    endless = itertools.cycle(items)
    return lambda: next(endless)


def _llama(use: Use, **changes: Any) -> Any:
    transformers = library("transformers")

    sizes = {
        "vocab_size": use.size(8000, 128),
        "hidden_size": use.size(512, 32),
        "intermediate_size": use.size(1376, 64),
        "num_hidden_layers": use.size(4, 2),
        "num_attention_heads": use.size(8, 2),
        "num_key_value_heads": use.size(8, 2),
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).to(use.device)


def _tokens(use: Use, *shape: int) -> torch.Tensor:
    return torch.randint(1, use.size(8000, 128), shape, device=use.device)


def _parameters(model: nn.Module) -> Callable[[], Tensors]:
    return lambda: [p for p in model.parameters() if p.requires_grad]


# ---- transformers' Trainer


TRAINED = 16  # optimizer steps of a call of the loops that a library owns
LENGTHS = (32, 48, 64, 96, 128)


def _texts(use: Use, lengths: Iterable[int], count: int) -> Any:
    """Samples of the lengths in turn, on the host."""
    samples = [_tokens(use, n).cpu() for n, _ in zip(itertools.cycle(lengths), range(count))]
    return [{"input_ids": ids, "labels": ids} for ids in samples]


def _padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    ids = pad([s["input_ids"] for s in samples], batch_first=True)
    labels = pad([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def _trainer(use: Use, lengths: tuple[int, ...] = (64,), checkpoints: bool = False, **arguments: Any) -> Any:
    transformers = library("transformers")

    model = _llama(use, use_cache=False)
    if checkpoints:  # a Trainer adds a hook at each `train()` instead, and the model is compiled again
        model.gradient_checkpointing_enable({"use_reentrant": False})

    # Batches of one sample each have their own length.
    batch = 4 if len(lengths) == 1 else 1
    settings = {
        "output_dir": str(use.folder),
        "max_steps": TRAINED,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": TRAINED,
        "disable_tqdm": True,
        "dataloader_pin_memory": use.cuda,
        "use_cpu": not use.cuda,
        "bf16": use.cuda,
        "torch_compile": True,
        "torch_compile_mode": use.mode,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings | arguments),
        train_dataset=_texts(use, lengths, 64),
        eval_dataset=_texts(use, lengths, 10),  # the last batch is smaller
        data_collator=_padded,
    )


def _trains(use: Use, **arguments: Any) -> Client:
    trainer = _trainer(use, **arguments)

    def step() -> Tensors:
        trainer.train()
        logged = [row[key] for row in trainer.state.log_history for key in ("train_loss", "eval_loss") if key in row]
        return [torch.tensor(logged)]

    return Client(step, _parameters(trainer.model), TRAINED, loop=lambda: _runtime(trainer))


def _runtime(trainer: Any) -> float:
    return float(trainer.state.log_history[-1]["train_runtime"])


for _name, _arguments in {
    "": {},
    " lengths": {"lengths": LENGTHS},
    " accumulation": {"gradient_accumulation_steps": 4},
    " checkpointing": {"checkpoints": True},
    " evaluation": {"eval_strategy": "steps", "eval_steps": TRAINED // 2},
}.items():
    client(f"trainer{_name}", "transformers", "accelerate")(functools.partial(_trains, **_arguments))


@client("trainer resume", "transformers", "accelerate")
def trainer_resume(use: Use) -> Client:
    """Half of the steps, a checkpoint, and the other half by a new Trainer that resumes from it."""
    saved = {"save_strategy": "steps", "save_steps": TRAINED // 2}
    trainer = _trainer(use, **saved)
    resumed: list[Any] = []

    def loop() -> float:
        return _runtime(trainer) + _runtime(resumed[0])

    def step() -> Tensors:
        trainer.args.max_steps = TRAINED // 2
        trainer.train()
        resumed[:] = [_trainer(use, **saved, seed=1)]
        resumed[0].train(resume_from_checkpoint=str(use.folder / f"checkpoint-{TRAINED // 2}"))
        return [torch.tensor([row["train_loss"] for row in resumed[0].state.log_history if "train_loss" in row])]

    return Client(step, lambda: _parameters(resumed[0].model)(), TRAINED, loop=loop)


# ---- accelerate, Lightning


def _accelerate(use: Use, precision: str) -> Client:
    """With fp16 a scaler skips the steps whose gradients overflow."""
    accelerate = library("accelerate")

    accelerator = accelerate.Accelerator(
        mixed_precision=precision if use.cuda or precision == "bf16" else "no",
        cpu=not use.cuda,
        gradient_accumulation_steps=2,
        dynamo_plugin=library("accelerate.utils").TorchDynamoPlugin(backend="inductor", mode=use.mode),
    )
    plain = _llama(use, use_cache=False)
    loader = torch.utils.data.DataLoader(_texts(use, (64,), 32), batch_size=4, collate_fn=_padded)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), loader)
    batches = turns(loader)

    def step() -> Tensors:
        with accelerator.accumulate(model):
            loss = model(**batches()).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [loss]

    return Client(step, _parameters(plain), cycle=2)


for _name in ("bf16", "fp16"):
    client(f"accelerate {_name}", "transformers", "accelerate")(functools.partial(_accelerate, precision=_name))


@client("lightning", "lightning", "transformers")
def lightning(use: Use) -> Client:
    lightning = library("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _llama(use, use_cache=False)
            self.losses: list[torch.Tensor] = []
            self.seconds = 0.0

        def on_train_start(self) -> None:
            self.seconds = -time.perf_counter()

        def on_train_end(self) -> None:
            self.losses[-1].item()
            self.seconds += time.perf_counter()

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            return self.model(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            self.losses.append(outputs["loss"].clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    module = Module()
    compiled = use.compile(module)
    loader = torch.utils.data.DataLoader(_texts(use, (64,), 4 * TRAINED), batch_size=4, collate_fn=_padded)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"precision": "bf16-mixed", "gradient_clip_val": 1.0, **dict.fromkeys(quiet, False)}

    def step() -> Tensors:
        module.losses.clear()
        kind = "gpu" if use.cuda else "cpu"
        lightning.Trainer(accelerator=kind, devices=1, max_steps=TRAINED, **settings).fit(compiled, loader)
        return module.losses

    return Client(step, _parameters(module), TRAINED, loop=lambda: module.seconds)


# ---- peft


def _adapted(use: Use) -> Any:
    peft = library("peft")

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_llama(use, use_cache=False), config)
    model.add_adapter("second", config)
    return model


@client("peft training", "peft", "transformers")
def peft_training(use: Use) -> Client:
    model = _adapted(use)
    compiled = use.compile(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = turns([_tokens(use, 4, 64) for _ in range(4)])

    def step() -> Tensors:
        batch = ids()
        with use.autocast():
            loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    return Client(step, _parameters(model))


@client("peft adapters", "peft", "transformers")
def peft_adapters(use: Use) -> Client:
    """Inference that switches between two adapters, without one, and with one merged."""
    model = _adapted(use).eval()
    compiled = use.compile(model)
    batch = _tokens(use, 1, 64)

    def logits() -> torch.Tensor:
        return compiled(input_ids=batch).logits.clone()

    @torch.no_grad()
    def step() -> Tensors:
        found = []
        for name in ("default", "second"):
            model.set_adapter(name)
            found.append(logits())
        with model.disable_adapter():
            found.append(logits())
        model.merge_adapter()
        found.append(logits())
        model.unmerge_adapter()
        return found

    return Client(step, steps=4)


# ---- sentence-transformers


WORDS = [f"word{i}" for i in range(100)]


def _sentences(count: int, least: int, most: int) -> list[str]:
    lengths = torch.randint(least, most, (count,)).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,)).tolist()) for n in lengths]


def _sentence_model(use: Use) -> Any:
    sentence_transformers = library("sentence_transformers")
    transformers = library("transformers")
    models = library("sentence_transformers.models")

    vocabulary = use.folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizer(str(vocabulary)).save_pretrained(use.folder)
    heads, layers = use.size(6, 2), use.size(6, 2)
    sizes = {"hidden_size": 64 * heads, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = transformers.BertConfig(vocab_size=128, intermediate_size=256 * heads, **sizes)
    transformers.BertModel(config).save_pretrained(use.folder)
    modules = [models.Transformer(str(use.folder), max_seq_length=128), models.Pooling(config.hidden_size)]
    return sentence_transformers.SentenceTransformer(modules=modules, device=use.device)


@client("sentence-transformers encode", "sentence_transformers")
def sentence_encode(use: Use) -> Client:
    """Sentences of any length, sorted by the library; the last batch is smaller."""
    model = _sentence_model(use)
    model.compile(mode=use.mode)
    texts = [_sentences(use.size(70, 10), 3, 100) for _ in range(2)]
    texts_in_turn = turns(texts)

    def step() -> Tensors:
        batch = use.size(16, 4)
        return [model.encode(texts_in_turn(), batch_size=batch, convert_to_tensor=True, show_progress_bar=False)]

    return Client(step, cycle=2, steps=5)


@client("sentence-transformers training", "sentence_transformers")
def sentence_training(use: Use) -> Client:
    losses = library("sentence_transformers.losses")

    model = _sentence_model(use)
    loss_of = losses.MultipleNegativesRankingLoss(model)
    model.compile(mode=use.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokenize = getattr(model, "preprocess", model.tokenize)
    pairs = turns([(_sentences(8, 12, 13), _sentences(8, 20, 21)) for _ in range(2)])

    def step() -> Tensors:
        features = [{k: v.to(use.device) for k, v in tokenize(t).items() if torch.is_tensor(v)} for t in pairs()]
        with use.autocast():
            loss = loss_of(features, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    return Client(step, _parameters(model), cycle=2)


# ---- timm


@client("timm training", "timm")
def timm_training(use: Use) -> Client:
    """With an exponential moving average of the weights."""
    timm = library("timm")

    model = timm.create_model("resnet50" if use.cuda else "test_resnet", num_classes=10).to(use.device)
    average = library("timm.utils").ModelEmaV3(model, decay=0.9)
    optimizer = library("timm.optim").create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    compiled = use.compile(model)
    side = use.size(224, 64)
    images = turns([torch.randn(use.size(32, 2), 3, side, side, device=use.device) for _ in range(2)])
    labels = torch.randint(0, 10, (use.size(32, 2),), device=use.device)

    def step() -> Tensors:
        with use.autocast():
            loss = F.cross_entropy(compiled(images()), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        return [loss]

    return Client(step, lambda: [*model.parameters(), *average.module.parameters(), *average.module.buffers()])


@client("timm inference", "timm")
def timm_inference(use: Use) -> Client:
    """An epoch whose last batch is smaller."""
    timm = library("timm")

    model = timm.create_model("vit_small_patch16_224" if use.cuda else "test_vit", num_classes=10)
    compiled = use.compile(model.to(use.device).eval())
    side = model.pretrained_cfg["input_size"][-1]
    batches = [torch.randn(n, 3, side, side, device=use.device) for n in (8, 8, 8, 3)]

    @torch.inference_mode()
    def step() -> Tensors:
        return [compiled(images).softmax(-1) for images in batches]

    return Client(step, steps=len(batches))


# ---- generate


NEW = 24  # tokens


def _generates(use: Use, model: Any, inputs: list[dict[str, Any]], new: int = NEW, **settings: Any) -> Client:
    """transformers compiles the forward by itself where the cache is a static one."""
    transformers = library("transformers")

    config = transformers.CompileConfig(mode=use.mode)
    config._compile_all_devices = True
    settings |= {"cache_implementation": "static", "compile_config": config, "min_new_tokens": new}
    inputs_in_turn = turns(inputs)

    def step() -> Tensors:
        return [model.generate(**inputs_in_turn(), max_new_tokens=new, **settings)]

    return Client(step, steps=new, cycle=len(inputs))


def _language(use: Use, lengths: tuple[int, ...] = (16,), **settings: Any) -> Client:
    model = _llama(use).eval().to(torch.bfloat16 if use.cuda else torch.float32)
    if "num_beams" in settings:  # which generate compiles nothing for
        model.forward = use.compile(model.forward)
    prompts = [_tokens(use, 1, n) for n in lengths]
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts]
    return _generates(use, model, inputs, **{"do_sample": False, **settings})


for _name, _arguments in {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 50, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "prompts": {"lengths": (5, 16, 23, 40, 64)},
}.items():
    client(f"generate {_name}", "transformers")(functools.partial(_language, **_arguments))


@client("whisper", "transformers")
def whisper(use: Use) -> Client:
    transformers = library("transformers")

    layers, heads, width = use.size(4, 2), use.size(6, 2), use.size(384, 32)
    sizes = {
        f"{half}_{what}": n
        for half in ("encoder", "decoder")
        for what, n in (("layers", layers), ("attention_heads", heads))
    }
    config = transformers.WhisperConfig(
        d_model=width,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=use.size(1500, 50),
        **sizes,
    )
    model = transformers.WhisperForConditionalGeneration(config).to(use.device).eval()
    frames = 2 * config.max_source_positions
    sounds = [{"input_features": torch.randn(1, config.num_mel_bins, frames, device=use.device)} for _ in range(2)]
    return _generates(use, model, sounds, do_sample=False)


# ---- diffusers


def _flux(use: Use) -> tuple[Any, dict[str, torch.Tensor]]:
    diffusers = library("diffusers")

    heads, layers = use.size(8, 2), use.size(3, 1)
    model = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=layers,
        num_single_layers=2 * layers,
        attention_head_dim=use.size(64, 16),
        num_attention_heads=heads,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24) if use.cuda else (4, 6, 6),
    )
    dtype = torch.bfloat16 if use.cuda else torch.float32
    model = model.to(use.device, dtype).eval()
    pixels, words = use.size(256, 16), use.size(64, 8)
    inputs = {
        "encoder_hidden_states": torch.randn(1, words, 64, device=use.device, dtype=dtype),
        "pooled_projections": torch.randn(1, 32, device=use.device, dtype=dtype),
        "img_ids": torch.randint(0, 16, (pixels, 3), device=use.device).to(dtype),
        "txt_ids": torch.zeros(words, 3, device=use.device, dtype=dtype),
    }
    return model, inputs


def _denoises(
    use: Use, model: Any, inputs: dict[str, torch.Tensor], before: Callable[[], Any] = lambda: None
) -> Client:
    """Four steps of a sampler by Euler."""
    tokens, channels = inputs["img_ids"].shape[0], 16
    noise = torch.randn(1, tokens, channels, device=use.device, dtype=inputs["img_ids"].dtype)
    times = torch.linspace(1.0, 0.0, 5, device=use.device, dtype=noise.dtype)

    @torch.no_grad()
    def step() -> Tensors:
        before()
        latents = noise
        for now, after in itertools.pairwise(times):
            velocity = model(hidden_states=latents, timestep=now.expand(1), **inputs, return_dict=False)[0]
            latents = latents + (after - now) * velocity
        return [latents]

    return Client(step, steps=4)


@client("flux blocks", "diffusers")
def flux_blocks(use: Use) -> Client:
    """Each repeated block compiled by itself."""
    model, inputs = _flux(use)
    model.compile_repeated_blocks(mode=use.mode, fullgraph=True)
    return _denoises(use, model, inputs)


@client("flux adapters", "diffusers", "peft")
def flux_adapters(use: Use) -> Client:
    """The same, with another adapter for each image."""
    peft = library("peft")

    model, inputs = _flux(use)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    for name in ("first", "second"):
        model.add_adapter(config, adapter_name=name)
    model.compile_repeated_blocks(mode=use.mode, fullgraph=True)
    names = turns(("first", "second"))
    return dataclasses.replace(_denoises(use, model, inputs, lambda: model.set_adapter(names())), cycle=2)


# ---- torchao


def _quantized(use: Use, config: str) -> Client:
    quantization = library("torchao.quantization")

    model = _llama(use, use_cache=False).bfloat16().eval()
    quantization.quantize_(model, getattr(quantization, config)())
    compiled = use.compile(model)
    batches = turns([_tokens(use, 1, 64) for _ in range(4)])

    @torch.no_grad()
    def step() -> Tensors:
        return [compiled(input_ids=batches()).logits]

    return Client(step)


for _name, _config in {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}.items():
    client(f"torchao {_name}", "torchao", "transformers")(functools.partial(_quantized, config=_config))


# ---- PyTorch Geometric


@client("pyg graphs", "torch_geometric")
def pyg_graphs(use: Use) -> Client:
    """Training on batches of graphs; no two batches have as many nodes and edges."""
    gnn, data = library("torch_geometric.nn"), library("torch_geometric.data")

    width = use.size(128, 16)
    layers = [(gnn.SAGEConv(width, width), "x, edge_index -> x"), nn.ReLU(inplace=True)]
    body = [
        *layers,
        (gnn.GCNConv(width, width), "x, edge_index -> x"),
        nn.ReLU(),
        (gnn.global_mean_pool, "x, batch -> x"),
    ]
    model = gnn.Sequential("x, edge_index, batch", [*body, nn.Linear(width, 4)]).to(use.device)
    compiled = use.compile(model, dynamic=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def graph(nodes: int) -> Any:
        return data.Data(x=torch.randn(nodes, width), edge_index=torch.randint(0, nodes, (2, 4 * nodes)), y=nodes % 4)

    sizes = [torch.randint(10, 60, (8,)).tolist() for _ in range(6)]
    batches = turns([data.Batch.from_data_list([graph(n) for n in s]).to(use.device) for s in sizes])

    def step() -> Tensors:
        batch = batches()
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(batch.x, batch.edge_index, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
        return [loss]

    return Client(step, _parameters(model), cycle=len(sizes))


# ---- loops without a library


class _Policy(nn.Module):
    def __init__(self, seen: int, actions: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def _chosen(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Logarithms of the probabilities of actions."""
    return logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)


@client("ppo")
def ppo(use: Use) -> Client:
    """Rollouts by one compiled policy, with an environment in eager; then epochs of minibatches by a compiled loss."""
    seen, actions, environments, horizon, parts = 8, 4, 16, 16, 4
    policy = _Policy(seen, actions, use.size(256, 32)).to(use.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    act = use.compile(policy)
    effects = torch.randn(actions, seen, device=use.device)
    world = torch.randn(environments, seen, device=use.device)

    @use.compile
    def loss_of(
        states: torch.Tensor, taken: torch.Tensor, before: torch.Tensor, gains: torch.Tensor, returns: torch.Tensor
    ) -> torch.Tensor:
        logits, value = policy(states)
        now = _chosen(logits, taken)
        ratio = (now - before).exp()
        surrogate = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return 0.5 * F.mse_loss(value, returns) - surrogate - 0.01 * entropy

    def step() -> Tensors:
        nonlocal world
        rollout = []
        with torch.no_grad():
            for _ in range(horizon):
                logits, value = act(world)
                taken = torch.distributions.Categorical(logits=logits).sample()
                rollout.append((world, taken, _chosen(logits, taken), value.clone()))
                world = (0.9 * world + 0.1 * effects[taken]).clone()
            gathered = [torch.stack(column) for column in zip(*rollout)]
            states, taken, before, values = gathered
            returns = -states.square().mean(-1).flip(0).cumsum(0).flip(0)
            batch = [t.flatten(0, 1) for t in (states, taken, before, returns - values, returns)]
        losses = []
        for _ in range(2):
            order = torch.randperm(environments * horizon, device=use.device)
            for part in order.chunk(parts):
                loss = loss_of(*(t[part] for t in batch))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.detach().clone())
        return [*losses, world]

    return Client(step, _parameters(policy), steps=horizon + 2 * parts)


@client("gru policy")
def gru_policy(use: Use) -> Client:
    """A recurrent policy: each call's hidden state, an output of compiled code, is an input of the next one; then a
    step of training through time."""
    seen, actions, width, length = 16, 4, use.size(256, 32), 8
    cell, head = nn.GRUCell(seen, width).to(use.device), nn.Linear(width, actions).to(use.device)
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    states = turns([torch.randn(length, 8, seen, device=use.device) for _ in range(2)])

    @use.compile
    def act(state: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = cell(state, hidden)
        return head(hidden), hidden

    @use.compile
    def loss_of(sequence: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        hidden, total = sequence.new_zeros(sequence.shape[1], width), sequence.new_zeros(())
        for state, action in zip(sequence, taken):
            hidden = cell(state, hidden)
            total = total - _chosen(head(hidden), action).mean()
        return total

    def step() -> Tensors:
        sequence, taken = states(), []
        with torch.no_grad():
            hidden = torch.zeros(8, width, device=use.device)
            for state in sequence:
                logits, hidden = act(state, hidden)
                taken.append(torch.distributions.Categorical(logits=logits).sample())
        loss = loss_of(sequence, torch.stack(taken))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss, *taken]

    return Client(step, lambda: parameters, steps=length + 1, cycle=2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class _GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@client("nanogpt")
def nanogpt(use: Use) -> Client:
    """Micro-batches whose gradients add up, dropout, clipping, and a learning rate that changes at each step."""
    length, parts = use.size(256, 16), 4
    model = _GPT(use.size(8000, 128), length, use.size(384, 32), use.size(6, 2), use.size(6, 2)).to(use.device)
    compiled = use.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=use.cuda)
    numbers = itertools.count()

    def step() -> Tensors:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + next(numbers) / 10)
        losses = []
        for _ in range(parts):
            ids = _tokens(use, use.size(8, 2), length + 1)
            with use.autocast():
                loss = compiled(ids[:, :-1], ids[:, 1:]) / parts
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses

    return Client(step, _parameters(model))


@client("server")
def server(use: Use) -> Client:
    """Four threads answer requests of their own lengths by one compiled model, each on a stream of its own."""
    threads, requests, width = 4, 4, use.size(512, 32)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(use.size(4, 2)))).to(use.device).eval()
    compiled = use.compile(model)
    asked = [
        [torch.randn(1, 16 * (1 + i % 2), width, device=use.device) for i in range(requests)] for _ in range(threads)
    ]
    streams = [torch.cuda.Stream() if use.cuda else None for _ in range(threads)]

    def step() -> Tensors:
        answers: list[list[torch.Tensor]] = [[] for _ in range(threads)]
        errors: list[Exception] = []
        if use.cuda:
            torch.cuda.synchronize()  # what the threads read is there

        def work(number: int) -> None:
            stream = streams[number]
            try:
                with torch.no_grad(), torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                    for request in asked[number]:
                        answers[number].append(compiled(request).clone())
                    if stream:
                        stream.synchronize()
            except Exception as error:
                errors.append(error)

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if errors:
            raise errors[0]
        return [answer for each in answers for answer in each]

    return Client(step, steps=threads * requests)
