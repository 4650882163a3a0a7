"""The command line of the package: one parser, and what all commands share.

A command is a module of this folder with `run(options)`, which returns an `Outcome`. Its options are declared here, and
this module imports no torch: help comes at once, and also where the overlay refuses the installed PyTorch.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn, TYPE_CHECKING

from torch_overlay.version import __version__


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

STATUSES = {
    0: "the command ran and has no finding",
    1: "a finding. `status`: the overlay refuses the installed PyTorch; `check`: a race or a lost promise; `doctor`: "
    "fewer launches in graphs than `--fail-under`; `demo`: a graph break, a different result or a missing package",
    2: "the command could not run: a wrong option, no such program, a program that failed, exited or has nothing to "
    "compile, an output that could not be written; stderr has one line with the cause",
    130: "the command was interrupted",
}
PICTURES = (".svg", ".json")
SWITCH: dict[str, Any] = {"action": "store_true"}
ON_OFF: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}
RACES: dict[str, Any] = {"choices": ("report", "ok"), "default": "report"}


@dataclasses.dataclass(frozen=True)
class Command:
    """`target`: "FILE:FUNCTION", whose function may be optional, or "" for a command that runs no program of the
    user's. `takes_script`: a file without a function is run as a script, with the arguments after it. `calls`: the
    default of --calls; `suffixes`: the formats of --out; `options`: the command's own."""

    summary: str
    details: str = ""
    target: str = ""
    takes_script: bool = False
    calls: int = 1
    suffixes: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def share(text: str) -> float:
    """Return a share that is written as a part of one, or as a percentage."""
    number = float(text.removesuffix("%"))
    number = number / 100 if text.endswith("%") or number > 1 else number
    if not 0 <= number <= 1:
        raise ValueError
    return number


COMMANDS = {
    "status": Command(
        "the machine, the installed PyTorch, options and seams",
        options={"--seams": {**SWITCH, "help": "list all seams"}},
    ),
    "explain": Command(
        "graph breaks, streams, events, CUDA graphs and memory of a program",
        "After a summary come, for each piece of code that Dynamo compiled, the plan (the launches in order, each with "
        "its line, and the events around it), buffers that live longer than on one stream, and regions without the "
        "CUDA graph that they asked for. --out draws what ran on the device from the first compiled call on.",
        "FILE[:FUNCTION]",
        True,
        suffixes=PICTURES,
        options={
            "--graph": {**SWITCH, "help": "print the FX graphs, with the stream of each node"},
            "--wrappers": {**SWITCH, "help": "print the generated call() functions"},
        },
    ),
    "check": Command(
        "races of a compiled function, in eager and as it is compiled",
        "The generated code runs on a simulated device; no GPU is used. The report has both accesses of a race and the "
        "edge that is missing, promises of eager to the code around the call that the compiled code does not keep, and "
        "events that order nothing. The function may be one that calls compiled functions.",
        "FILE:FUNCTION",
        calls=2,
        options={
            "--fullgraph": {**SWITCH, "help": "a graph break is an error"},
            "--misaligned": {**ON_OFF, "help": "check with inputs that aren't aligned, too, which are copied (on)"},
            "--eager-races": {**RACES, "help": "ok: races in eager are no finding (report)"},
            "--plan": {**SWITCH, "help": "print the plans, too"},
        },
    ),
    "doctor": Command(
        "causes that keep a program out of CUDA graphs, and their remedies",
        "The report has the share of launches in graphs, and for each cause of the others the operator, the line, its "
        "cost and a remedy. Switches among the remedies are tried in processes of their own, with the results compared "
        "(of a script: the text it prints). The last line names the first thing to do. Half of the calls warm up.",
        "FILE[:FUNCTION]",
        True,
        8,
        (".html",),
        {
            "--no-tries": {**SWITCH, "help": "try no switches"},
            "--remedy": {"metavar": "FUNCTION", "help": "the function as you have changed it: try it, too"},
            "--trial": {"help": argparse.SUPPRESS},  # of `doctor.tried`: JSON
            "--fail-under": {"type": share, "metavar": "SHARE", "help": "of launches in graphs: 0.95, 95 or 95%%"},
        },
    ),
    "timeline": Command(
        "kernels and copies of a call over time, by stream, as a picture",
        "A call after those that compile the function is drawn; of a file without a function, the one that its make() "
        "returns with its arguments. The format .json is that of https://ui.perfetto.dev.",
        "FILE[:FUNCTION]",
        suffixes=PICTURES,
    ),
    "demo": Command(
        "the programs in examples/: plans, pictures and, on a GPU, times",
        "The programs are compiled for a simulated GPU, so the first table is the same on every machine. On a GPU they "
        "are run as well, in processes of their own, under stock torch.compile and with the overlay in turns.",
        options={
            "programs": {"nargs": "*", "metavar": "PROGRAM", "help": "names of files in examples/"},
            "--out": {"dest": "folder", "metavar": "FOLDER", "help": "write the pictures there (build/demo)"},
            "--compile-only": {**SWITCH, "help": "do not run the programs, GPU or not"},
        },
    ),
}


class UsageError(Exception):
    """Raised if a command can't run. The text says what is wrong, where, and what to do."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a command. `data` is printed as JSON if --json is given, else `show` prints the report; `save` writes
    a file of --out, and raises ValueError or OSError if it can't."""

    status: int
    data: Any
    show: Callable[[], object]
    save: Callable[[str], object] = lambda name: None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help`)")


class _Completion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, option: str | None = None) -> None:
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            raise UsageError(f"{option} needs the package shtab: pip install shtab") from None
        command, parser.prog = parser.prog, "torch_overlay"  # completion is of a word
        print(shtab.complete(parser, shell))
        print(f'torch_overlay() {{ {command.replace("python", shlex.quote(sys.executable))} "$@"; }}')
        parser.exit()


def _shared(name: str, command: Command) -> _Parser:
    """Return the parent of a command's parser: the options that have one meaning in every command that takes them."""
    parent = _Parser(add_help=False)
    add = parent.add_argument
    add("--json", **SWITCH, help="print JSON; all other output goes to stderr")
    if command.suffixes:
        formats = " or ".join(command.suffixes)
        add("--out", action="append", default=[], metavar="NAME", help=f"write a file: {formats}")
    if not command.target:
        return parent
    add("--backward", **SWITCH, help="run the backward of the outputs as well")
    add("--mode", help="mode of torch.compile")
    add("--calls", type=int, default=command.calls, help="number of calls (%(default)s)")
    add("--devices", type=int, default=1, help="number of GPUs to simulate (%(default)s)")
    if name != "check":
        simulated = "simulate a GPU, as where there is none: nothing is computed, and times are estimates"
        add("--simulate", **SWITCH, help=simulated)
    inputs = "a function gets the inputs that FUNCTION_inputs() or example_inputs() of the file returns"
    add("target", metavar=command.target, help=inputs)
    if command.takes_script:
        add("arguments", nargs=argparse.REMAINDER, help="arguments of the script that FILE is without a FUNCTION")
    return parent


def parser() -> argparse.ArgumentParser:
    width = shutil.get_terminal_size().columns - 2
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * 7, break_on_hyphens=False)
    table = [wrapper.fill(f"  {n:<4} {text}") for n, text in STATUSES.items()]
    whole = _Parser(
        prog="python -m torch_overlay",
        epilog="\n".join(["exit status:", *table]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"torch_overlay {__version__}")
    help = "print the completion of a shell function torch_overlay; needs the package shtab"
    whole.add_argument("--print-completion", action=_Completion, choices=("bash", "zsh"), help=help)
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        text = f"{command.summary[0].upper()}{command.summary[1:]}. {command.details}"
        parents = [_shared(name, command)]
        own = commands.add_parser(name, help=command.summary, description=text, parents=parents, allow_abbrev=False)
        for option, given in command.options.items():
            own.add_argument(option, **given)
    return whole


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options. Raise UsageError for those that can't be followed."""
    whole = parser()
    if not argv:
        whole.parse_args(["--help"])
    options, unknown = whole.parse_known_args(argv)
    arguments = getattr(options, "arguments", [])
    if arguments and ":" in (target := options.target):  # a function has no arguments, so they are options
        before = argv[: len(argv) - len(arguments) - 1]
        options, unknown = whole.parse_known_args([*before, *arguments, target])
        unknown += [word for word in (options.target, *options.arguments) if word != target]
    if unknown:
        raise UsageError(f"no option or argument {' '.join(unknown)} (`{whole.prog} {options.command} --help`)")
    if not options.command:
        whole.error("no command is named")
    _check_values(options, COMMANDS[options.command])
    return options


def _check_values(options: argparse.Namespace, command: Command) -> None:
    for name in getattr(options, "out", ()):
        if not name.endswith(command.suffixes):
            raise UsageError(f"--out {name}: {options.command} writes {' or '.join(command.suffixes)}")
    if not command.target:
        return
    path, colon, function = options.target.rpartition(":")
    options.path, options.function = (path, function) if colon else (options.target, "")
    if not os.path.isfile(options.path):
        raise UsageError(f"no file {options.path}" if options.path else "no file is named")
    if not options.function and (colon or command.target == "FILE:FUNCTION"):
        raise UsageError(f"{options.target} names no function: the program is given as {command.target}")
    least = 4 if options.command == "doctor" else 1
    if options.calls < least:
        why = ": graphs are made at the second call" if least > 1 else ""
        raise UsageError(f"--calls must be at least {least}, got {options.calls}{why}")
    if not 1 <= options.devices <= 8:
        raise UsageError(f"--devices must be 1 to 8, got {options.devices}")
    if command.takes_script and not options.function:
        given = {"--backward": options.backward, "--mode": options.mode, "--calls": options.calls != command.calls}
        given["--remedy"] = getattr(options, "remedy", None)
        for option in (option for option, value in given.items() if value):
            raise UsageError(f"{option} is about the function of FILE:FUNCTION: a script has none, and runs as it is")


def main(argv: Sequence[str], prepare: Callable[[argparse.Namespace], None] = lambda options: None) -> int:
    """Run a command; return the exit status. `prepare` is called before the command's module is imported."""
    name = argv[0] if argv and argv[0] in COMMANDS else "torch_overlay"
    try:
        options = parse(argv)
        prepare(options)
        return _run(options)
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted before there was anything to report", file=sys.stderr)
        return 130
    except SystemExit as done:  # of --help and its like
        return int(done.code or 0)


def _run(options: argparse.Namespace) -> int:
    with output_apart() if options.json else contextlib.nullcontext():
        outcome: Outcome = importlib.import_module(f"{__package__}.{options.command}").run(options)
    if options.json:
        print(json.dumps(outcome.data, default=_plain))
        atexit.register(lambda: (sys.stdout.flush(), os.dup2(2, 1)))  # what handlers of the program print at the exit
    else:
        outcome.show()
    for name in getattr(options, "out", ()):
        try:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            outcome.save(name)
        except (OSError, ValueError) as error:
            print(f"{options.command}: --out {name} could not be written: {error}", file=sys.stderr)
            return 2
        print(f"wrote {name}", file=sys.stderr)
    return outcome.status


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


@contextlib.contextmanager
def output_apart() -> Iterator[None]:
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
