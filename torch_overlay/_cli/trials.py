"""Tries remedies for the doctor, each in a process of its own: the same command with one option more.

A remedy that ends the process, or that changes something for good, does no harm to the diagnosis.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay.analysis.doctor import remedies
from torch_overlay.analysis.doctor.diagnose import are_equal
from torch_overlay.analysis.doctor.diagnosis import Diagnosis, Trial


if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT = 600.0  # seconds


def tried(found: Diagnosis, output: str, command: Sequence[str]) -> list[Trial]:
    """Try the switches among the remedies. `command`: the arguments of the doctor that made the diagnosis; `output`:
    what a script printed meanwhile, which is its result."""
    return [
        _tried(found, output, command, code, remedies.as_text(options), {"options": options})
        for code, options in remedies.switches(found.findings)
    ]


def tried_function(found: Diagnosis, name: str, command: Sequence[str]) -> Trial:
    """Try another function of the same file, on the same inputs."""
    return _tried(found, "", command, found.findings[0].code if found.findings else "", name, {"function": name})


def _tried(
    found: Diagnosis, output: str, command: Sequence[str], code: str, change: str, trial: dict[str, Any]
) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        trial = {**trial, "results": str(results)}
        whole = [sys.executable, "-m", "torch_overlay", "doctor", "--trial", json.dumps(trial), *command]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return Trial(code, change, found.share, 0.0, found.ms, None, False, f"no answer in {TIMEOUT:.0f} s")
        if done.returncode or not results.exists():
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            return Trial(code, change, found.share, 0.0, found.ms, None, False, said[-1])
        answer, printed, given = torch.load(results)
    after = json.loads(answer)
    equal = are_equal([r.cpu() for r in found.results], given) and printed == output
    return Trial(code, change, found.share, after["share"], found.ms, after["ms"], equal)
