"""Draws what runs when, on which stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_overlay._cli import program
from torch_overlay._cli.commands import Outcome
from torch_overlay.analysis.timelines.timeline import timeline


if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> Outcome:
    with program.running(options, program.device(options)):
        fn, inputs = program.load(options.path, options.function)
        found = timeline(
            program.as_compiled(fn, mode=options.mode),
            *inputs,
            calls=options.calls,
            backward=options.backward,
            devices=options.devices,
            title=options.function or Path(options.path).stem,
        )
    return Outcome(0, found, lambda: print(found), found.save)
