#!/usr/bin/env python
"""Runs a command on a copy of the installed PyTorch that has the whole landing stack applied, and no hook.

    python tools/run_stack.py python tools/generated_text.py --out stack
    python tools/run_stack.py --keep DIR            make the copy in DIR, and leave it there

`torch_overlay.x` is there the module of the stack that has the text of x, under another name; only what isn't meant to
go upstream, as the simulated GPU, is still the overlay's (`stack_form`). So what is compiled there, and how the tests
judge it, is what upstream would have.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import export_upstream
import run_patched
from series import installed_root, SeriesError


NAMES = "landing_stack"  # a module of the copy: which module of the overlay is which of the stack


def names() -> dict[str, list[str]]:
    """Return each module of the overlay that the stack adds, and where: a module, or several that share its names."""
    found: dict[str, list[str]] = {}
    for request in export_upstream.declared():
        for module, target in request.names.items():
            found.setdefault(module, []).append(target)
    return found


def texts() -> dict[str, str]:
    """Return the text of each file that the stack edits or adds. Raises SeriesError where edits don't fit one tree."""
    after: dict[str, str] = {}
    for request in export_upstream.declared():
        after |= {**request.edited(after), **request.files}
    return after


def make_copy(copy: Path) -> None:
    """Make a folder like the installed site-packages, with the stack applied."""
    after = texts()
    run_patched.make_copy(installed_root(), copy)
    for path, text in after.items():
        target = copy / path
        target.unlink(missing_ok=True)  # a link to the installed file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (copy / f"{NAMES}.py").write_text(f"NAMES = {names()!r}\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.command and options.keep is None:
        parser.error("a command, or --keep DIR, is missing")
    copy = options.keep or Path(tempfile.mkdtemp(prefix="stacked_torch_"))
    try:
        copy.mkdir(parents=True, exist_ok=True)
        make_copy(copy)
        return run_patched.run(options.command, copy) if options.command else 0
    except SeriesError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if options.keep is None:
            shutil.rmtree(copy, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
