"""Runs the command line (`_cli.commands`), with the overlay enabled.

If the overlay refuses the installed PyTorch, the command line shows no traceback: `status` shows what was refused and
why.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TYPE_CHECKING

import torch_overlay
from torch_overlay._cli import commands
from torch_overlay.errors import OverlayError


if TYPE_CHECKING:
    import argparse


def enable(options: argparse.Namespace) -> None:
    """Enable the overlay for a command. Only `status` goes on without one that the installed PyTorch refuses."""
    try:
        if options.command == "status":
            torch_overlay._enable(torch_overlay._installer.wait_for_compilation)
        else:
            torch_overlay.enable()
    except (OverlayError, ValueError) as error:
        if options.command != "status" or (isinstance(error, OverlayError) and error.reason == "broken_package"):
            raise commands.UsageError(str(error)) from error
        options.refused = True
        return
    if options.command == "status" or (status := torch_overlay.status()).enabled:
        return
    if options.command == "check":
        raise commands.UsageError(f"needs the overlay, of stock PyTorch it sees no waits: {status.why}")
    print(f"{options.command}: this is stock PyTorch, the overlay is not enabled: {status.why}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Run a command; return the exit status."""
    return commands.main(argv, enable)


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
