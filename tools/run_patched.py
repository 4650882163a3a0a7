#!/usr/bin/env python
"""Runs a command on a copy of the installed PyTorch that has the patch series applied.

    python tools/run_patched.py pytest test           the test suite, in its patched form
    python tools/run_patched.py --keep DIR            make the copy in DIR and leave it there, with the series applied

The copy is cheap: torch/ is a tree of hard links (or symbolic links, across file systems), all other packages
are one symbolic link each. Applying replaces files and never writes to one, so the installed tree keeps its text. After
the command the series is reversed, and every file of the copy must again be, byte for byte, that of the installed tree.
The exit status is the command's, or 1 if the copy differs.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import apply_patches
from series import installed_root, read_series, series_folder, SeriesError


ROOT = Path(__file__).resolve().parent.parent


def link(source: str, target: str) -> None:
    """A hard link where the file system allows one, else a symbolic link."""
    try:
        os.link(source, target)
    except OSError:
        os.symlink(source, target)


def make_copy(installed: Path, copy: Path) -> None:
    """A folder like the installed site-packages, in which torch/ can be changed."""
    shutil.copytree(installed / "torch", copy / "torch", copy_function=link)
    for name in sorted(change.path for patch in read_series(series_folder()) for change in patch.changes):
        if (copy / name).is_symlink():  # applying would follow it
            (copy / name).unlink()
            shutil.copy2(installed / name, copy / name)
    for entry in installed.iterdir():
        # Links to .pth files would run them twice; the interpreter has read them already.
        if entry.name not in ("torch", "__pycache__") and entry.suffix != ".pth":
            os.symlink(entry, copy / entry.name)


def files_of(tree: Path) -> set[str]:
    """Relative paths of all files of a torch/ folder, but for Python's bytecode."""
    return {
        str(Path(folder, name).relative_to(tree))
        for folder, _, names in os.walk(tree)
        if not folder.endswith("__pycache__")
        for name in names
    }


def differences(installed: Path, copy: Path) -> list[str]:
    """Files that are not the same, byte for byte. Two links to one file are, so only replaced files are read."""
    left, right = files_of(installed / "torch"), files_of(copy / "torch")
    changed = [
        name
        for name in left & right
        if not os.path.samefile(installed / "torch" / name, copy / "torch" / name)
        and not filecmp.cmp(installed / "torch" / name, copy / "torch" / name, shallow=False)
    ]
    return sorted(changed) + sorted(left ^ right)


def environment(copy: Path) -> dict[str, str]:
    path = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TORCHINDUCTOR_CACHE_DIR": str(copy / "cache")}


def run(command: list[str], copy: Path) -> int:
    """Runs the command with this Python."""
    program, *arguments = command
    if program in ("python", "pytest"):
        command = [sys.executable, *(["-m", "pytest"] if program == "pytest" else []), *arguments]
    return subprocess.run(command, env=environment(copy), cwd=ROOT).returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.command and options.keep is None:
        parser.error("a command, or --keep DIR, is missing")
    installed = installed_root()
    copy = options.keep or Path(tempfile.mkdtemp(prefix="patched_torch_"))
    try:
        copy.mkdir(parents=True, exist_ok=True)
        try:
            make_copy(installed, copy)
        except SeriesError as error:
            print(error, file=sys.stderr)
            return 1
        if apply_patches.main([str(copy)]) != 0:
            return 1
        status = run(options.command, copy) if options.command else 0
        if options.keep is not None:
            print(f"PYTHONPATH={copy} runs Python with the patched torch")
            return status
        if apply_patches.main(["--reverse", str(copy)]) != 0:
            return 1
        changed = differences(installed, copy)
        print("\n".join(changed) or "reversed: every file is again that of the installed tree")
        return 1 if changed else status
    finally:
        if options.keep is None:
            shutil.rmtree(copy, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
