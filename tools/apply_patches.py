#!/usr/bin/env python
"""Applies the patch series to a PyTorch tree, or takes it back out.

    python tools/apply_patches.py PATH              apply
    python tools/apply_patches.py --check PATH      would it apply? (with --reverse: would it come out?) Changes nothing
    python tools/apply_patches.py --reverse PATH    restore the tree, byte for byte
    python tools/apply_patches.py --list            the patches, in order, with the files that each changes

PATH is a checkout of PyTorch at the base release, or an installed tree: the folder that contains `torch/`, or that
`torch/` itself. Only the files that the series changes are looked at. Each must have the SHA-256 that base.json has
for it; a tree that is dirty, or of another release, is refused by the names of the files. The new contents are all
computed before the first file is written, files are replaced whole, and an error while writing puts back what was
written: the tree has the series or it does not. Needs Python's standard library and nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from series import apply_change, base, PatchFile, read_series, series_folder, SeriesError, sha256


Contents = dict[str, str | None]


def tree_root(path: Path) -> Path:
    """The folder that contains torch/."""
    path = path.absolute()
    if (path / "torch").is_dir():
        return path
    if path.name == "torch" and path.is_dir():
        return path.parent
    raise SeriesError(f"{path}: neither a folder that contains torch/, nor a torch/ folder")


def read(root: Path, series: list[PatchFile]) -> Contents:
    """Every file that the series touches, as it is now."""
    found: Contents = {}
    for name in {change.path for patch in series for change in patch.changes}:
        try:
            found[name] = (root / name).read_bytes().decode()
        except FileNotFoundError:
            found[name] = None
    return found


def transform(series: list[PatchFile], before: Contents, reverse: bool) -> Contents:
    """Every file that the series touches, as it will be."""
    after = dict(before)
    for patch in reversed(series) if reverse else series:
        for change in reversed(patch.changes) if reverse else patch.changes:
            after[change.path] = apply_change(change, after[change.path], reverse)
    return after


def check_base(contents: Contents, series: list[PatchFile], root: Path) -> None:
    """Refuses a tree whose files are not those of the base release."""
    new = {change.path for patch in series for change in patch.changes if change.is_new}
    record = base()
    expected = record["files"]
    assert isinstance(expected, dict)
    problems = []
    for name, content in sorted(contents.items()):
        if name in new:
            if content is not None:
                problems.append(f"  {name}: exists already")
        elif content is None:
            problems.append(f"  {name}: no such file")
        elif sha256(content) != expected.get(name):
            problems.append(
                f"  {name}: SHA-256 {sha256(content)[:16]}…, the base has {expected.get(name, 'none')[:16]}…"
            )
    if problems:
        raise SeriesError(f"{root} is not an untouched tree of PyTorch {record['tag']}:\n" + "\n".join(problems))


def is_applied(contents: Contents, series: list[PatchFile], root: Path) -> bool:
    """Is this the tree that applying the series gives?"""
    try:
        check_base(transform(series, contents, reverse=True), series, root)
    except SeriesError:
        return False
    return True


class Replacement:
    """One file that is replaced in a single step, or removed, and can be put back.

    The old file is renamed, not written to: its other hard links keep the old text, and putting it back needs no space.
    """

    def __init__(self, path: Path, content: str | None) -> None:
        self.path = path
        self.had_file = path.exists()
        self.new = path.with_name(f".{path.name}.{os.getpid()}.new") if content is not None else None
        self.old = path.with_name(f".{path.name}.{os.getpid()}.old")
        if self.new is not None and content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.new.write_bytes(content.encode())
            if self.had_file:
                shutil.copymode(path, self.new)

    def commit(self) -> None:
        if self.had_file:
            os.replace(self.path, self.old)
        if self.new is not None:
            os.replace(self.new, self.path)

    def roll_back(self) -> None:
        if self.old.exists():
            os.replace(self.old, self.path)
        elif not self.had_file:
            self.path.unlink(missing_ok=True)

    def clean_up(self) -> None:
        self.old.unlink(missing_ok=True)
        if self.new is not None:
            self.new.unlink(missing_ok=True)


def write(root: Path, before: Contents, after: Contents) -> None:
    """Writes all files, or none."""
    replacements: list[Replacement] = []
    result = before
    try:
        for name in sorted(after):
            if after[name] != before[name]:
                replacements.append(Replacement(root / name, after[name]))
        for replacement in replacements:
            replacement.commit()
        result = after
    except BaseException:
        for replacement in reversed(replacements):
            replacement.roll_back()
        raise
    finally:
        for replacement in replacements:
            replacement.clean_up()
        remove_empty_folders(root, result)


def remove_empty_folders(root: Path, contents: Contents) -> None:
    """Removes the folders that files which are gone have left, and the bytecode that Python put there."""
    gone = {folder for name, text in contents.items() if text is None for folder in (root / name).parents}
    for folder in sorted(gone, key=lambda folder: len(folder.parts), reverse=True):
        if folder.is_dir() and root in folder.parents and {entry.name for entry in folder.iterdir()} <= {"__pycache__"}:
            shutil.rmtree(folder)


def list_series(series: list[PatchFile]) -> None:
    for patch in series:
        print(patch.name)
        for change in patch.changes:
            print(f"  {'new ' if change.is_new else 'edit'} {change.path}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--reverse", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    if options.path is None and not options.list:
        parser.error("PATH is missing")
    try:
        series = read_series(series_folder())
        if options.list:
            list_series(series)
            return 0
        root = tree_root(options.path)
        before = read(root, series)
        if not options.reverse:
            if is_applied(before, series, root):
                raise SeriesError(f"{root}: the series is applied already; --reverse takes it out")
            check_base(before, series, root)
        after = transform(series, before, options.reverse)
        if options.reverse:
            check_base(after, series, root)
        if not options.check:
            write(root, before, after)
    except (SeriesError, OSError, UnicodeDecodeError) as error:
        print(f"{error}\nNothing was changed.", file=sys.stderr)
        return 1
    verb = "would be " if options.check else ""
    state = "reversed" if options.reverse else "applied"
    print(f"{len(series)} patches {verb}{state}: {len(after)} files in {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
