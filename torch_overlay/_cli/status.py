"""The status: the machine, the installed PyTorch, the options and the seams."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import torch_overlay
from torch_overlay._cli.commands import Outcome
from torch_overlay._cli.screen import Screen


if TYPE_CHECKING:
    import argparse


def machine() -> dict[str, str]:
    """Return what compiled code needs of the machine."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    module = Path("/proc/driver/nvidia/version")
    driver = [word for word in module.read_text().split() if word[:1].isdigit()][:1] if module.exists() else []
    if version := torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else 0:
        driver.append(f"CUDA {version // 1000}.{version % 1000 // 10}")
    compiler = os.environ.get("CC") or ("gcc" if shutil.which("gcc") else "clang")  # as Triton chooses
    return {
        "GPU": ", ".join(gpus) or "none: programs are compiled for a simulated one",
        "driver": ", ".join(driver) or "none",
        "CUDA of PyTorch": torch.version.cuda or "none: install the CUDA build of PyTorch",
        "C compiler": shutil.which(compiler) or "none: Triton needs gcc, clang, or the one that CC names",
    }


def run(options: argparse.Namespace) -> Outcome:
    status, found = torch_overlay.status(), machine()

    def show() -> None:
        screen = Screen()
        screen.table("Machine", ("", ""), [*found.items()])
        for table in status.tables(options.seams):
            screen.table(*table)
        for line in status.lines():
            screen.line(line)

    return Outcome(int(getattr(options, "refused", False)), {"machine": found, **vars(status)}, show)
