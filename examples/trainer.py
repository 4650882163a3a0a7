"""Transformers' Trainer, whose compiled forward and backward are relaunched.

`torch_compile=True` is all that the Trainer has to be told, with `import torch_overlay` before it. The loop stays the
library's: it logs, clips, accumulates and updates in eager. A batch is two launches, a graph of the forward and one of
the backward. Gradients of two batches are added up, and the optimizer updates parameters in place: no tensor of these
needs a fixed address.

    python examples/trainer.py

It needs accelerate, as the Trainer does (`pip install accelerate`).
"""

from __future__ import annotations

import importlib.util
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torch_overlay
from torch_overlay.testing import simulated_gpu


STEPS, LENGTH = 8, 64
CONFIG = LlamaConfig(vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, use_cache=False)


def train() -> None:
    texts = torch.randint(1, CONFIG.vocab_size, (64, LENGTH))
    samples: Any = [{"input_ids": text, "labels": text} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            bf16=True,
            logging_steps=STEPS,
            save_strategy="no",
            report_to="none",
            torch_compile=True,
            torch_compile_mode="reduce-overhead",
        )
        Trainer(model=LlamaForCausalLM(CONFIG), args=settings, train_dataset=samples).train()


def main() -> None:
    if importlib.util.find_spec("accelerate") is None:
        print("The Trainer needs accelerate, which isn't installed: pip install accelerate")
        return
    with nullcontext() if torch.cuda.is_available() else simulated_gpu():
        train()
        print(torch_overlay.coverage())


if __name__ == "__main__":
    main()
