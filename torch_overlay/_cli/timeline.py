"""python -m torch_overlay timeline FILE[:FUNCTION] --out NAME.svg -- draws what runs when, on which stream.

    timeline model.py:forward --out step.svg         compiles `forward`, calls it with the inputs that
                                                     `forward_inputs()` or `example_inputs()` of that file
                                                     returns, and draws one call
    timeline model.py:loss --backward --out s.json   draws its backward as well, for https://ui.perfetto.dev
    timeline examples/moe_experts.py --out moe.svg   runs the function that `make()` of the file returns
                                                     with its arguments

--out may be given more than once. On a machine with a GPU the call is profiled there. Elsewhere, or with --simulate, it
runs on a simulated device, and times are estimates from memory traffic and arithmetic at the rates of a data sheet, for
a device that never waits for its host.

The exit status is 0, or 2 if the function could not be found or run, or a file could not be written.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import torch

from torch_overlay._cli import program
from torch_overlay._cli.program import UsageError
from torch_overlay.analysis.timelines.run import timeline
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    import argparse

    from torch_overlay.analysis.timelines.timeline import Timeline


def main(argv: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = program.parser("timeline", __doc__)
    parser.add_argument("--out", action="append", metavar="NAME", help="a file to write: .svg or .json")
    parser.add_argument("--backward", action="store_true", help="run the backward of the outputs as well")
    parser.add_argument("--calls", type=int, default=1, help="how many calls to draw (1)")
    parser.add_argument("--mode", help="mode of torch.compile")
    parser.add_argument("--simulate", action="store_true", help="on a simulated GPU even where there is a real one")
    parser.add_argument("--devices", type=int, default=1, help="how many GPUs to simulate (1)")
    parser.add_argument("target", metavar="FILE[:FUNCTION]")
    options = parser.parse_args(argv)
    path, _, function = options.target.partition(":")
    try:
        program.check_file(path)
        program.check_pictures("--out", options.out or ())
        program.check_options(options)
        found = draw(path, function, options)
    except UsageError as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"timeline: {options.target} could not be run:", file=sys.stderr)
        print(program.failure(error, path), file=sys.stderr)
        return 2
    print(found)
    for name in options.out or ():
        try:
            written = found.save(name)
        except (OSError, ValueError) as error:  # the folder can't be made, or nothing ran on the device
            print(f"timeline: no picture: {error}", file=sys.stderr)
            return 2
        print(f"wrote {written}")
    return 0


def draw(path: str, name: str, options: argparse.Namespace) -> Timeline:
    simulate = options.simulate or not torch.cuda.is_available()
    with program.importable(path), simulated_gpu(options.devices) if simulate else contextlib.nullcontext():
        fn, inputs = program.load(path, name)
        return timeline(
            program.as_compiled(fn, mode=options.mode),
            *inputs,
            calls=options.calls,
            backward=options.backward,
            simulate=simulate,
            devices=options.devices,
            title=name or os.path.splitext(os.path.basename(path))[0],
        )
