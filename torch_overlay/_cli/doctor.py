"""python -m torch_overlay doctor FILE:FUNCTION | SCRIPT [ARGUMENTS] -- what keeps a program out of CUDA graphs.

    doctor model.py:forward            runs `forward` on the inputs that `forward_inputs()` or `example_inputs()` of
                                       that file returns; if it isn't compiled, with mode="reduce-overhead"
    doctor train.py:loss --backward    runs the backward of the outputs as well
    doctor train.py --epochs 1         runs a script, with the code that it compiles itself; what comes after the script
                                       is the script's
    doctor model.py:forward --remedy better    also runs `better` of that file, on the inputs of `forward`

Prints what runs in graphs and what does not: the cause, the operator, the line, what it costs, what to change; and what
the switches among the remedies bring, and your own remedy, each tried in a process of its own, with the results
compared (of a script: what it prints). The last line says what to do first. Without a GPU, or with --simulate, the
program is compiled for a simulated one, and nothing is timed or compared. A script that fails, exits or is interrupted
gets a report of what it had run. With --json, all that the program prints goes to stderr.

The exit status is 0; 1 if less than the share of --fail-under is in graphs; 2 if there is no such program, if it failed
or exited with another status than 0, if nothing in it asks for CUDA graphs, or if the page can't be written; 130 if it
was interrupted.

Tries remedies for the doctor, each in a process of its own: the same command with one option more.

A remedy that ends the process, or that changes something for good, does no harm to the diagnosis.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TextIO, TYPE_CHECKING

import torch

from torch_overlay._cli import program
from torch_overlay._cli.program import UsageError
from torch_overlay._inductor.relaunch import coverage as counts
from torch_overlay.analysis.doctor import diagnose, eager, fresh_start, remedies
from torch_overlay.analysis.doctor.diagnose import compared, diagnosis, findings_of, logged, patched, unless_they_vary
from torch_overlay.analysis.doctor.diagnosis import Diagnosis, DIFFER, EQUAL, Trial, Work
from torch_overlay.testing import observe, simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


TIMEOUT = 600.0  # seconds


def tried(
    found: Diagnosis, output: str, command: Sequence[str], switches: bool = True, function: str = ""
) -> list[Trial]:
    """Try the switches among the remedies, and another function of the same file on the same inputs. `command`: the
    arguments of the doctor that made the diagnosis; `output`: what a script printed meanwhile, which is its result.
    Each trial is printed before it begins; an interrupt ends it."""
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


def main(argv: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = program.parser("doctor", __doc__)
    parser.add_argument("--backward", action="store_true", help="run the backward of the outputs as well")
    parser.add_argument("--steps", type=int, default=8, help="how many steps, at least 4; half of them warm up (8)")
    parser.add_argument("--simulate", action="store_true", help="simulate a GPU even if there is one")
    parser.add_argument("--no-tries", action="store_true", help="try no switches")
    parser.add_argument("--remedy", metavar="FUNCTION", help="the function as you have changed it: try it, too")
    parser.add_argument("--trial", help=argparse.SUPPRESS)  # of `tried`: JSON
    parser.add_argument("--fail-under", type=share, metavar="SHARE", help="of launches in graphs: 0.95, 95 or 95%%")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page")
    parser.add_argument("target", metavar="FILE[:FUNCTION]")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    target, arguments = options.target, options.arguments
    path, colon, function = target.rpartition(":")
    path = path if colon else target
    if colon and arguments:  # a function has no arguments, so they are options
        options = parser.parse_args([*arguments, target], options)
        arguments = [options.target, *options.arguments][:-1]
        options.target = target
    try:
        program.check_file(path, target)
        if options.steps < 4:
            raise UsageError(f"--steps must be at least 4, got {options.steps}: graphs are made at the second call")
        if colon and arguments:
            raise UsageError(f"{function} is called on its example inputs, and takes no {' '.join(arguments)}")
        if options.remedy and not colon:
            raise UsageError("--remedy takes the place of FUNCTION in FILE:FUNCTION; a script has none")
        with _output_apart() if options.json else contextlib.nullcontext():
            found = run(path, function if colon else "", arguments, options)
    except KeyboardInterrupt:
        print(f"doctor: {options.target} was interrupted before there was anything to report", file=sys.stderr)
        return 130
    except UsageError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        text = " ".join(program.failure(error, path).split())
        print(f"doctor: {options.target} failed: {text}", file=sys.stderr)
        return 2
    status = 0 if not found.ended else 130 if found.ended == program.INTERRUPTED else 2
    if not found.coverage.get("functions") and not found.findings:
        why = f"nothing in {options.target} asks for CUDA graphs. {found.first()}"
        print(f"doctor: {options.target} {found.ended}" if status else f"doctor: {why}", file=sys.stderr)
        return status or 2
    print(found.to_json() if options.json else found)
    try:
        if options.html:
            Path(options.html).parent.mkdir(parents=True, exist_ok=True)
            Path(options.html).write_text(found.to_html(), encoding="utf-8")
    except OSError as error:
        print(f"doctor: no page: {error}", file=sys.stderr)
        return 2
    if not status and options.fail_under is not None and found.share < options.fail_under:
        wanted = f"{100 * options.fail_under:g} %"
        print(f"doctor: {100 * found.share:.1f} % of launches are in CUDA graphs, under {wanted}", file=sys.stderr)
        return 1
    return status


def share(text: str) -> float:
    """Return a share that is written as a part of one, or as a percentage."""
    number = float(text.removesuffix("%"))
    number = number / 100 if text.endswith("%") or number > 1 else number
    if not 0 <= number <= 1:
        raise ValueError
    return number


@contextlib.contextmanager
def _output_apart() -> Iterator[None]:
    """Send to stderr what the program and its children print: stdout is for the report alone."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def run(path: str, function: str, arguments: list[str], options: argparse.Namespace) -> Diagnosis:
    simulate = options.simulate or not torch.cuda.is_available()
    trial = json.loads(options.trial) if options.trial else {}
    output = ""
    around = simulated_gpu() if simulate else contextlib.nullcontext()
    with program.importable(path), around, patched(trial.get("options", {})):
        fresh_start.seed()  # the same weights, inputs and losses in each process
        if function:
            fn, inputs = program.load(path, trial.get("function", function), function, options.remedy or "")
            found = diagnose(
                fn,
                *inputs,
                backward=options.backward,
                steps=options.steps,
                target=options.target,
                tries=False,
                without_graphs=not trial,
            )
        else:
            found, output = of_script(path, arguments, simulate)
    if trial:
        torch.save((found.to_json(), output, [result.cpu() for result in found.results]), trial["results"])
        return found
    flags = ["--steps", str(options.steps), *["--backward"] * options.backward, *["--simulate"] * options.simulate]
    command = [*flags, options.target, *arguments]
    if not found.ended:
        made = tried(found, output, command, not options.no_tries, options.remedy or "")
        found = dataclasses.replace(found, trials=tuple(made))
    if options.json:  # what handlers at the exit print comes after the report
        atexit.register(lambda: (sys.stdout.flush(), os.dup2(2, 1)))
    return logged(found)


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
