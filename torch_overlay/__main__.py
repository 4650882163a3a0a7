"""Runs the command line: status, and the tools of other modules.

If the overlay refuses the installed PyTorch, the command line shows no traceback: `status` shows what was refused and
why.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any, TYPE_CHECKING

import torch_overlay
from torch_overlay.errors import OverlayError


if TYPE_CHECKING:
    from torch_overlay._engine.report import Status

COMMANDS = {
    "explain": "torch_overlay._cli.explain",
    "check": "torch_overlay._cli.check",
    "doctor": "torch_overlay._cli.doctor",
    "timeline": "torch_overlay._cli.timeline",
    "demo": "torch_overlay._cli.demo",
}
USAGE = """\
python -m torch_overlay status | explain | check | doctor | timeline | demo

    status                   what is installed, where, and why or why not
    explain FILE[:FUNCTION]  what the compiler makes of the streams in a program (`explain --help`)
    check FILE:FUNCTION      runs what is generated on a simulated device, and looks for races (`check --help`)
    doctor FILE[:FUNCTION]   what keeps a program out of CUDA graphs, and what to do first (`doctor --help`)
    timeline FILE[:FUNCTION] what runs when, on which stream: as a picture, or for Perfetto (`timeline --help`)
    demo                     compiles the programs in examples/ and shows what comes out (`demo --help`)"""


def print_status(status: Status) -> None:
    """Print the status as tables where rich is installed, else as plain lines."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(status)
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"torch_overlay {status.version}: [bold]{'enabled' if status.enabled else 'not enabled'}[/bold]")
    console.print(status.why, markup=False, highlight=False)
    versions = Table("", "needed", "found", title="Base", title_justify="left")
    for name, needed in status.base.items():
        versions.add_row(name, needed, status.found[name])
    features = Table("feature", "", "why", "what it is", title="Features", title_justify="left")
    for feature in status.features:
        features.add_row(feature.name, "on" if feature.on else "off", feature.why, feature.description)
    seams = Table("state", "kind", title="Seams, by patch", title_justify="left")
    seams.add_column("target", no_wrap=True, overflow="ignore")
    for patch in dict.fromkeys(entry.seam.patch for entry in status.seams):
        seams.add_row("", "", f"[bold]{patch or 'overlay form only'}[/bold]")
        for entry in status.seams:
            if entry.seam.patch == patch:
                seams.add_row(entry.state, entry.seam.kind, entry.seam.target)
        seams.add_section()
    for table in (versions, features, seams):
        console.print(table)
    for name in status.edited_files:
        console.print(f"{name} differs from the release, but no seam's target in it does", markup=False)


def main(argv: list[str]) -> int:
    """Dispatch the subcommands; return the exit status."""
    command, arguments = (argv[0], argv[1:]) if argv else ("help", [])
    if command in ("help", "--help", "-h") or (command == "status" and set(arguments) & {"--help", "-h"}):
        print(USAGE)
        return 0
    if command not in ("status", *COMMANDS):
        print(f"torch_overlay: there is no command {command}\n\n{USAGE}", file=sys.stderr)
        return 2
    if command == "status" and arguments:
        print(f"status: takes no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    refused: OverlayError | ValueError | None = None
    try:
        torch_overlay.enable()
    except (OverlayError, ValueError) as error:
        refused = error
    off_because = "" if refused or (status := torch_overlay.status()).enabled else status.why
    is_broken = isinstance(refused, OverlayError) and refused.reason == "broken_package"
    if command == "status" and not is_broken:
        print_status(torch_overlay.status())
    elif refused is not None:
        print(refused, file=sys.stderr)
    elif command == "check" and off_because and not set(arguments) & {"--help", "-h"}:
        print(f"check: needs the overlay, of stock PyTorch it sees no waits: {off_because}", file=sys.stderr)
        return 2
    else:
        if off_because:
            print(f"{command}: this is stock PyTorch, the overlay is not enabled: {off_because}", file=sys.stderr)
        return importlib.import_module(COMMANDS[command]).main(arguments) or 0
    return 1 if refused else 0


class _Stdout(io.FileIO):
    """Standard output that may have no reader any more, as before `| head`: what nobody reads is no error."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def run(argv: list[str]) -> int:
    """Run a command, whatever stdout is. The status is 2 if what it printed could not be written."""
    if sys.stdout is None:  # closed by the shell: `>&-`
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        old, raw = sys.stdout, _Stdout(sys.stdout.fileno(), "w", closefd=False)
        new = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, line_buffering=old.line_buffering)
        new.reconfigure(errors="backslashreplace", write_through=old.write_through)  # lines may have any characters
        sys.stdout = new
    try:
        status = main(argv)
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.filename is not None:
            raise
        print(f"torch_overlay: the output could not be written: {error}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    return 2


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
