"""Looks for races in a compiled function, on a simulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._cli import program
from torch_overlay._cli.commands import Outcome, UsageError
from torch_overlay.analysis.race_check.checking import check


if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> Outcome:
    with program.running(options, program.device(options)):
        fn, inputs = program.load(options.path, options.function)
        report = check(
            program.as_compiled(fn, mode=options.mode, fullgraph=options.fullgraph),
            *inputs,
            calls=options.calls,
            backward=options.backward,
            devices=options.devices,
            misaligned=options.misaligned,
        )
    if not report.compiled.frames:
        raise UsageError(f"{report.unchecked}: Dynamo compiled no frame of {options.target}")
    found = {"ok": report.ok, "unchecked": report.unchecked, "plan": report.plan, "notes": report.notes}
    for name in ("races", "eager_races", "lost", "redundant"):
        found[name] = list(map(str, getattr(report, name)))
    text = f"{report.plan}\n\n{report}" if options.plan and report.plan else str(report)
    is_clean = report.ok and (options.eager_races == "ok" or not report.eager_races)
    return Outcome(int(not is_clean), found, lambda: print(text))
