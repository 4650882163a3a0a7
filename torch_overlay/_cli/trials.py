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
from torch_overlay.analysis.doctor.diagnose import compared, unless_they_vary
from torch_overlay.analysis.doctor.diagnosis import Diagnosis, DIFFER, EQUAL, Trial, Work


if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT = 600.0  # seconds


def tried(
    found: Diagnosis, output: str, command: Sequence[str], switches: bool = True, function: str = ""
) -> list[Trial]:
    """Try the switches among the remedies, and another function of the same file on the same inputs. `command`: the
    arguments of the doctor that made the diagnosis; `output`: what a script printed meanwhile, which is its result.
    What is being tried is printed; an interrupt ends it."""
    what: list[tuple[str, str, dict[str, Any]]] = []
    if switches:
        chosen = remedies.switches(found.findings)
        what = [(code, remedies.as_text(options), {"options": options}) for code, options in chosen]
    if function:
        what.append((found.findings[0].code if found.findings else "", function, {"function": function}))
    made = []
    try:
        for number, (code, change, trial) in enumerate(what, 1):
            print(f"doctor: trying {change} ({number} of {len(what)})", file=sys.stderr, flush=True)
            made.append(_tried(found, output, command, (code, change), trial))
        return unless_they_vary(made, lambda: _tried(found, output, command, ("", ""), {}).results)
    except KeyboardInterrupt:
        print(f"doctor: interrupted: {len(what) - len(made)} of {len(what)} remedies were not tried", file=sys.stderr)
    return made


def _tried(
    found: Diagnosis, output: str, command: Sequence[str], what: tuple[str, str], trial: dict[str, Any]
) -> Trial:
    def fails(error: str) -> Trial:
        return Trial(*what, found.work, None, error=error)

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        trial = {**trial, "results": str(results)}
        whole = [sys.executable, "-m", "torch_overlay", "doctor", "--trial", json.dumps(trial), *command]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return fails(f"no answer in {TIMEOUT:.0f} s")
        if done.returncode or not results.exists():
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            return fails(said[-1])
        answer, printed, given = torch.load(results)
    after = json.loads(answer)
    results = compared([r.cpu() for r in found.results], given, found.simulated)
    if not found.simulated and (output or printed):
        results = DIFFER if printed != output else EQUAL
    return Trial(*what, found.work, Work(**after["work"]), found.ms, after["ms"], results)
