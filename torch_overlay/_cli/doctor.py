"""Finds what keeps a program out of CUDA graphs, and tries remedies.

Each remedy is tried in a process of its own, the same command with one option more: one that ends the process, or that
changes something for good, does no harm to the diagnosis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TextIO, TYPE_CHECKING

import torch

from torch_overlay._cli import program
from torch_overlay._cli.commands import Outcome, UsageError
from torch_overlay._inductor.relaunch import coverage as counts
from torch_overlay.analysis.doctor import diagnose, eager
from torch_overlay.analysis.doctor.diagnose import (
    as_text,
    compared,
    diagnosis,
    findings_of,
    logged,
    patched,
    seed,
    switches,
    unless_they_vary,
)
from torch_overlay.analysis.doctor.diagnosis import Diagnosis, DIFFER, EQUAL, Trial, Work
from torch_overlay.testing import observe


if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence


TIMEOUT = 600.0  # seconds


def tried(found: Diagnosis, output: str, command: Sequence[str], tries: bool = True, function: str = "") -> list[Trial]:
    """Try the switches among the remedies, and another function of the same file on the same inputs. `command`: the
    arguments of the doctor that made the diagnosis; `output`: what a script printed meanwhile, which is its result.
    Each trial is printed before it begins; an interrupt ends it."""
    chosen = switches(found.findings) if tries else []
    what: list[tuple[str, str, dict[str, Any]]]
    what = [(code, as_text(options), {"options": options}) for code, options in chosen]
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


def run(options: argparse.Namespace) -> Outcome:
    device, trial = program.device(options), json.loads(options.trial) if options.trial else {}
    found, output = _diagnosed(options, device, trial)
    if trial:
        torch.save((found.to_json(), output, [result.cpu() for result in found.results]), trial["results"])
    elif not found.ended:
        flags = ["--calls", str(options.calls), "--devices", str(options.devices)]
        flags += [*["--backward"] * options.backward, *["--simulate"] * found.simulated]
        flags += ["--mode", options.mode] if options.mode else []
        command = [*flags, options.target, *options.arguments]
        made = tried(found, output, command, not options.no_tries, options.remedy or "")
        found = dataclasses.replace(found, trials=tuple(made))
    status = 0 if not found.ended else 130 if found.ended == program.INTERRUPTED else 2
    if not found.coverage.get("functions") and not found.findings:
        if status:
            print(f"doctor: {options.target} {found.ended}", file=sys.stderr)
            return Outcome(status, found.to_dict(), lambda: None)
        raise UsageError(f"nothing in {options.target} asks for CUDA graphs. {found.first()}")
    if not trial:
        logged(found)
    if not status and options.fail_under is not None and found.share < options.fail_under:
        wanted = f"{100 * options.fail_under:g} %"
        print(f"doctor: {100 * found.share:.1f} % of launches are in CUDA graphs, under {wanted}", file=sys.stderr)
        status = 1
    return Outcome(
        status, found.to_dict(), lambda: print(found), lambda name: Path(name).write_text(found.to_html(), "utf-8")
    )


def _diagnosed(
    options: argparse.Namespace, device: contextlib.AbstractContextManager[Any], trial: dict[str, Any]
) -> tuple[Diagnosis, str]:
    """Return the diagnosis, and what a script printed."""
    changed = patched(trial.get("options", {}))
    if not options.function:
        with device as simulation, changed:
            seed()
            return of_script(options.path, options.arguments, simulation is not None)
    with program.running(options, device), changed:
        seed()  # the same weights, inputs and losses in each process
        name = trial.get("function", options.function)
        fn, inputs = program.load(options.path, name, options.function, options.remedy or "")
        found = diagnose(
            program.as_compiled(fn, mode=options.mode) if options.mode else fn,
            *inputs,
            backward=options.backward,
            steps=options.calls,
            target=options.target,
            tries=False,
            without_graphs=not trial,
        )
        return found, ""


def of_script(path: str, arguments: list[str], simulate: bool) -> tuple[Diagnosis, str]:
    """Diagnose a script over its whole run: launches are totals, and nothing is timed. Return what it printed, too."""
    printed = io.StringIO()
    with observe() as seen:
        with (
            eager.watched() as beside,
            contextlib.nullcontext({}) if simulate else eager.noted_waits() as noted,
            contextlib.redirect_stdout(_Both(printed, sys.stdout)),  # type: ignore[type-var]
        ):
            ended = program.run_script(path, arguments)
        if printed.getvalue()[-1:] not in ("", "\n"):
            print()  # the report begins on a line of its own
        coverage = dataclasses.replace(counts.coverage(), eager=beside.outside())
    found = diagnosis(path, simulate, coverage, findings_of(coverage, seen, 1, beside.waits | Counter(noted), {}))
    return dataclasses.replace(found, ended=ended, of_run=True), printed.getvalue()


class _Both:
    """Writes text to two streams; is the second one in all else: its file number, its bytes, its encoding."""

    def __init__(self, copy: TextIO, stream: TextIO) -> None:
        self.copy, self.stream = copy, stream

    def write(self, text: str) -> int:
        self.copy.write(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
