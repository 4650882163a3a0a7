"""The models of `models.py`: configurations of transformers, timm and diffusers, with random weights.

Each is built at about the size of its smallest published version, 12 layers at most, in bfloat16. A row is one model
for inference or for training; the rows of one library need that library alone.
"""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import torch
from relaunch_rows import DEVICE, inference, llama_config, SETS, tokens, training, Work  # pyrefly: ignore[missing-import]
from torch import nn


if TYPE_CHECKING:
    from collections.abc import Callable

    from relaunch_rows import Compile, Inputs  # pyrefly: ignore[missing-import]

LENGTH = 128
LENGTHS = {"mamba": 32}  # its scan is a loop in Python over the positions
CLASSES = 1000
GENERATED = 32  # tokens


# ---- transformers: name -> its class, its configuration's class, and what differs from the configuration's defaults


def _sizes(hidden: int, layers: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    """Settings by the names that most configurations have for them."""
    names = {"num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    return {"hidden_size": hidden, **names, "use_cache": False, **others}


LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {}),
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {"max_position_embeddings": 514}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", _sizes(768, 12, 12, 3072)),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {}),
    "mobilebert": ("MobileBertForMaskedLM", "MobileBertConfig", {"num_hidden_layers": 12}),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", _sizes(768, 6, 12, 3072)),
    "distilgpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6, "use_cache": False}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"use_cache": False}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _sizes(768, 12, 12, 3072)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _sizes(896, 12, 14, 4864, num_key_value_heads=2)),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _sizes(768, 8, 8, 3072, num_key_value_heads=4, head_dim=96, vocab_size=32000),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _sizes(512, 4, 8, 1024, num_key_value_heads=4, num_local_experts=4),
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 8000, "use_cache": False},
    ),
}
_HALVES = {
    f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in (("layers", 6), ("attention_heads", 12))
}
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {  # encoder and decoder
    "t5-small": ("T5ForConditionalGeneration", "T5Config", {"use_cache": False, "decoder_start_token_id": 0}),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"d_model": 768, **_HALVES, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "use_cache": False},
    ),
}
IMAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit-base": ("ViTForImageClassification", "ViTConfig", {"num_labels": CLASSES}),
    "swin": ("SwinForImageClassification", "SwinConfig", {"num_labels": CLASSES}),
}
SPEECH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {"use_cache": False, "decoder_start_token_id": 1}),
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2Config", {"num_hidden_layers": 6, "mask_time_prob": 0.0}),
}
TIMM = (
    *("resnet18", "mobilenetv3_large_100", "efficientnet_b0", "convnext_tiny", "swin_tiny_patch4_window7_224"),
    *("vit_small_patch16_224", "mixer_b16_224", "regnety_016"),
)
DIFFUSERS = ("unet", "dit", "vae")
TRAINED = ("bert", "electra", "distilgpt2", "t5-small", "bart", "vit-base", "resnet18", "convnext_tiny")


def _built(kind: tuple[str, str, dict[str, Any]]) -> Any:
    import transformers as hf

    model, config, changes = kind
    with torch.device(DEVICE):
        return getattr(hf, model)(getattr(hf, config)(**changes)).bfloat16()


def _random(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(SETS)]


def _classes(batch: int) -> list[torch.Tensor]:
    return [torch.randint(0, CLASSES, (batch,), device=DEVICE) for _ in range(SETS)]


def _text(name: str, train: bool, compile: Compile) -> Work:
    """A language model; one that is a pair gets the same tokens on both sides."""
    model = _built((LANGUAGE | PAIRS)[name])
    inputs = tokens(model.config.vocab_size, 8 if train else 1, LENGTHS.get(name, LENGTH))
    if train:
        return training(model, compile, inputs, lambda ids: model(input_ids=ids, labels=ids).loss)
    if name in PAIRS:
        return inference(model, compile, inputs, lambda ids: model(input_ids=ids, decoder_input_ids=ids).logits)
    return inference(model, compile, inputs, lambda ids: model(input_ids=ids).logits)


def _images(model: nn.Module, train: bool, compile: Compile, call: Callable[[torch.Tensor], torch.Tensor]) -> Work:
    batch = 32 if train else 1
    images = _random(batch, 3, 224, 224)
    if not train:
        return inference(model, compile, [(x,) for x in images], call)
    inputs: list[Inputs] = list(zip(images, _classes(batch)))
    return training(model, compile, inputs, lambda x, y: nn.functional.cross_entropy(call(x).float(), y))


def _image(name: str, train: bool, compile: Compile) -> Work:
    model = _built(IMAGES[name])
    return _images(model, train, compile, lambda x: model(pixel_values=x).logits)


def _timm(name: str, train: bool, compile: Compile) -> Work:
    import timm  # pyrefly: ignore[missing-import]

    with torch.device(DEVICE):
        model = timm.create_model(name).bfloat16()
    return _images(model, train, compile, lambda x: model(x))


def _speech(name: str, train: bool, compile: Compile) -> Work:
    model = _built(SPEECH[name])
    if name == "wav2vec2":
        inputs: list[Inputs] = [(x,) for x in _random(1, 16000)]
        return inference(model, compile, inputs, lambda x: model(x).last_hidden_state)
    texts = tokens(model.config.vocab_size, 1, 64)
    inputs = [(x, *text) for x, text in zip(_random(1, 80, 3000), texts)]
    return inference(model, compile, inputs, lambda x, ids: model(input_features=x, decoder_input_ids=ids).logits)


def _diffusers(name: str, train: bool, compile: Compile) -> Work:
    import diffusers  # pyrefly: ignore[missing-import]

    def built(kind: Any, **settings: Any) -> Any:
        model = kind(**settings)
        return model.to(DEVICE, torch.bfloat16)

    times = [torch.randint(0, 1000, (2,), device=DEVICE) for _ in range(SETS)]
    if name == "vae":
        model = built(
            diffusers.AutoencoderKL,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(64, 128, 128),
            latent_channels=4,
        )
        return inference(model, compile, [(x,) for x in _random(1, 4, 32, 32)], lambda x: model.decode(x).sample)
    if name == "dit":
        model = built(
            diffusers.DiTTransformer2DModel,
            num_attention_heads=6,
            attention_head_dim=64,
            num_layers=12,
            sample_size=32,
            num_embeds_ada_norm=CLASSES,
        )
        latents: list[Inputs] = list(zip(_random(2, 4, 32, 32), times, _classes(2)))
        return inference(model, compile, latents, lambda x, t, label: model(x, timestep=t, class_labels=label).sample)
    model = built(
        diffusers.UNet2DConditionModel,
        sample_size=32,
        block_out_channels=(128, 256, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=8,
    )
    conditions: list[Inputs] = list(zip(_random(2, 4, 32, 32), times, _random(2, 77, 256)))
    return inference(model, compile, conditions, lambda x, t, text: model(x, t, text).sample)


def _generate(compile: Compile) -> Work:
    """transformers' own loop, whose static cache has it compile the model's forward: greedy, from 16 tokens."""
    import transformers as hf

    with torch.device(DEVICE):
        model: Any = hf.LlamaForCausalLM(llama_config()).bfloat16().eval()
    forward = compile(model.forward)

    @functools.wraps(model.forward)  # by whose parameters the loop prepares its inputs
    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # or trees take the cache for an output that was overwritten
        return forward(*args, **kwargs)

    model.forward = step
    settings = dict(cache_implementation="static", do_sample=False, use_cache=True, disable_compile=True)

    def body(ids: torch.Tensor) -> torch.Tensor:
        return model.generate(ids, max_new_tokens=GENERATED, min_new_tokens=GENERATED, **settings)

    return Work(body, tokens(model.config.vocab_size, 1, 16), note=f"a step is {GENERATED} tokens")


_KINDS = [
    (LANGUAGE | PAIRS, _text),
    (IMAGES, _image),
    (SPEECH, _speech),
    (TIMM, _timm),
    (DIFFUSERS, _diffusers),
]
_builders = {name: build for names, build in _KINDS for name in names}
ROWS: dict[str, Callable[[Compile], Work]] = {
    **{name: functools.partial(build, name, False) for name, build in _builders.items()},
    **{f"{name} training": functools.partial(_builders[name], name, True) for name in TRAINED},
    "generate": _generate,
}
