"""python -m torch_overlay check FILE:FUNCTION -- looks for races in a compiled function.

    check model.py:forward               compiles `forward`, runs the generated code on a simulated device with the
                                         inputs that `forward_inputs()` or `example_inputs()` of that file returns (a
                                         tuple or a tensor; a function without parameters needs none), reports races
    check train.py:loss --backward       checks the backward of the outputs as well

No GPU is needed, and none is used: the file is run with simulated tensors, streams and events. The command prints races
that the function has in eager; races of the compiled code, with both accesses and the edge that is missing; promises
of eager to the code around a call that the compiled code does not keep; events that order nothing; and, with --plan,
the plans.

The exit status is 0 if there is no race and no lost promise; 1 for a race (also in eager, unless --eager-races ok is
given) or a lost promise; 2 if the function could not be found or run, or if nothing in it was compiled. FUNCTION is a
function that check compiles, or one that calls compiled functions.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from torch_overlay._cli import program
from torch_overlay._cli.program import UsageError
from torch_overlay.analysis.race_check.checking import check
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    from torch_overlay.analysis.race_check.race_report import Report


def main(argv: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = program.parser("check", __doc__)
    parser.add_argument("--backward", action="store_true", help="run the backward of the outputs as well")
    parser.add_argument("--calls", type=int, default=2, help="how many calls in a row (2)")
    parser.add_argument("--mode", help="mode of torch.compile")
    parser.add_argument("--devices", type=int, default=1, help="how many GPUs to simulate (1)")
    parser.add_argument("--fullgraph", action="store_true", help="a graph break is an error")
    parser.add_argument(
        "--misaligned",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check with inputs that aren't aligned, too, which compiled code copies (on)",
    )
    parser.add_argument(
        "--eager-races",
        choices=("report", "ok"),
        default="report",
        help="races that the function has in eager: status 1 (report), or not (ok); they are printed either way",
    )
    parser.add_argument("--plan", action="store_true", help="print the plans, too")
    parser.add_argument("target", metavar="FILE:FUNCTION")
    options = parser.parse_args(argv)
    path, _, function = options.target.rpartition(":")
    try:
        if not path or not function:
            raise UsageError(f"{options.target} doesn't name a function: FILE:FUNCTION")
        program.check_file(path)
        program.check_options(options)
        report = run(path, function, options)
    except UsageError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"check: {options.target} could not be run:", file=sys.stderr)
        print(program.failure(error, path), file=sys.stderr)
        return 2
    if not report.compiled.frames:
        print(f"check: {report.unchecked}: Dynamo compiled no frame of {options.target}", file=sys.stderr)
        return 2
    if options.plan and report.plan:
        print(report.plan, end="\n\n")
    print(report)
    return 0 if report.ok and (options.eager_races == "ok" or not report.eager_races) else 1


def run(path: str, name: str, options: argparse.Namespace) -> Report:
    with program.importable(path), simulated_gpu(options.devices):
        fn, inputs = program.load(path, name)
        return check(
            program.as_compiled(fn, mode=options.mode, fullgraph=options.fullgraph),
            *inputs,
            calls=options.calls,
            backward=options.backward,
            devices=options.devices,
            misaligned=options.misaligned,
        )
