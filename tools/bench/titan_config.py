"""torchtitan's own Trainer as the benchmark of training at scale uses it: its models, and what it is configured with.

What torchtitan has for Llama 3 is used as it is: FSDP2 over all GPUs that tensor parallelism leaves, selective
activation checkpointing, compilation of each block, the loss in chunks, flex attention. Tokens are drawn from a seed:
there is no tokenizer and no data set. Nothing is logged, saved or validated.

torchtitan imports more than a training step uses: modules of `UNUSED` need not be installed. While it is imported, they
have stand-ins, whose functions refuse to be called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import types
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = {  # -> model and flavor of torchtitan, layers where none are asked for (0: all of them)
    "debug": ("llama3", "debugmodel", 0),
    "8B": ("llama3", "8B", 16),
    "70B": ("llama3", "70B", 4),
    "qwen3-moe": ("qwen3", "debugmodel_moe", 0),
    "deepseek-v3": ("deepseek_v3", "debugmodel", 0),
}
UNUSED = {  # module that torchtitan imports -> names that it takes from there
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What is trained: a width of `WIDTHS` with so many layers, on `gpus` processes of which `tp` share a batch of
    `batch` sequences of `seq` tokens. `steps` are timed in a row."""

    width: str
    layers: int
    seq: int
    batch: int = 1
    tp: int = 1
    gpus: int = 2
    steps: int = 10
    device: str = "cuda"
    attention: str = "flex"
    deterministic: bool = False

    @property
    def name(self) -> str:
        parallel = f" tp {self.tp}" if self.tp > 1 else ""
        return f"{self.width} {self.layers} layers {self.batch} x {self.seq}{parallel}"

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all GPUs together."""
        return self.batch * self.seq * (self.gpus // self.tp)


def _stand_in(module: str) -> types.ModuleType:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torchtitan calls {module}, which this benchmark leaves out: take it from UNUSED of {__file__}"
        )

    made = types.ModuleType(module)
    made.__path__ = []  # type: ignore[attr-defined]
    for name in UNUSED[module]:
        setattr(made, name, refuse)
    return made


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Within it, modules of `UNUSED` that nobody has imported are stand-ins."""
    missing = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update({name: _stand_in(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


class _Host:
    """torch.cpu with the functions of an accelerator's module that torchtitan calls on its way to a step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=1)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def import_torchtitan(device: str = "cuda") -> None:
    """Import torchtitan for a device ("cuda" or "cpu"), which it otherwise chooses itself, once for a process."""
    with _stand_ins():
        utils: Any = importlib.import_module("torchtitan.tools.utils")
        if device == "cpu":
            utils.device_type, utils.device_module = device, _Host()
        importlib.import_module("torchtitan.trainer")


def model_of(width: str) -> Any:
    """torchtitan's ModelSpec of a width, with all of its layers. Needs `import_torchtitan`."""
    model, flavor, _ = WIDTHS[width]
    return importlib.import_module(f"torchtitan.models.{model}").model_registry(flavor)


def depth(width: str) -> int:
    """Layers that the model of a width has."""
    return len(model_of(width).model.layers)


def _components() -> types.SimpleNamespace:
    """Components of torchtitan's that are replaced. Classes are made where it has been imported."""
    from torchtitan.components.dataloader import BaseDataLoader  # pyrefly: ignore[missing-import]
    from torchtitan.components.metrics import MetricsProcessor  # pyrefly: ignore[missing-import]
    from torchtitan.components.tokenizer import BaseTokenizer  # pyrefly: ignore[missing-import]

    class RandomTokens(BaseDataLoader):
        """Batches of tokens that are drawn uniformly from a seed and the rank: input, positions, and labels, the next
        tokens. Each is [batch, seq] of int64, in host memory."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            vocabulary: int
            seed: int = 0

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.generator = torch.Generator().manual_seed(config.seed + dp_rank)
            self.vocabulary, self.size = config.vocabulary, (local_batch_size, seq_len)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            batch, seq = self.size
            positions = torch.arange(seq).expand(batch, seq).contiguous()
            while True:
                tokens = torch.randint(self.vocabulary, (batch, seq + 1), generator=self.generator)
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config): ...

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError("tokens are drawn at random")

        decode = get_vocab_size = encode  # type: ignore[assignment]

    class Losses(MetricsProcessor):
        """Keeps the loss and the gradient's norm of the steps made while `on`: to log them waits for the device."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config): ...

        def __init__(self, config: Any, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.on = True
            self.losses: list[float] = []
            self.norms: list[float] = []

        def should_log(self, step: int) -> bool:
            return self.on

        def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **_: Any) -> None:
            self.losses.append(global_avg_loss)
            self.norms.append(grad_norm)

    return types.SimpleNamespace(RandomTokens=RandomTokens, NoTokenizer=NoTokenizer, Losses=Losses)


def config(row: Row, whole_graph: bool, all_steps: int, folder: str) -> Any:
    """Return a Trainer.Config for `all_steps` steps of a row. With `whole_graph` torchtitan captures forward and
    backward of a step as one CUDA graph. Needs `import_torchtitan`; the model is built by the Trainer."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # pyrefly: ignore[missing-import]
    from torchtitan.components.optimizer import (  # pyrefly: ignore[missing-import]
        default_adamw,
        LRSchedulersContainer,
    )
    from torchtitan.config.configs import (  # pyrefly: ignore[missing-import]
        CommConfig,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from torchtitan.distributed.activation_checkpoint import SelectiveAC  # pyrefly: ignore[missing-import]
    from torchtitan.models.common.attention import ScaledDotProductAttention  # pyrefly: ignore[missing-import]
    from torchtitan.trainer import Trainer  # pyrefly: ignore[missing-import]

    spec, ours = model_of(row.width), _components()
    spec.model.layers = spec.model.layers[: row.layers]
    if row.attention == "sdpa":
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    vocabulary = spec.model.vocab_size
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=ours.NoTokenizer.Config(),
        dataloader=ours.RandomTokens.Config(vocabulary=vocabulary),
        metrics=ours.Losses.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary)),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=row.batch,
            seq_len=row.seq,
            steps=all_steps,
            disable_cuda_graphs=not whole_graph,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=row.tp),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=True),
        comm=CommConfig(init_timeout_seconds=1800),  # ranks that tune kernels wait for each other
        debug=DebugConfig(seed=0, deterministic=row.deterministic, deterministic_warn_only=True),
    )
