#!/usr/bin/env python
"""Applies the patch series to a PyTorch tree with the modules that it needs, or takes both back out.

    python tools/apply_patches.py PATH              apply
    python tools/apply_patches.py --check PATH      would it apply? (with --reverse: would it come out?) Changes nothing
    python tools/apply_patches.py --reverse PATH    restore the tree, byte for byte
    python tools/apply_patches.py --list            the patches, in order, with the files that each changes

PATH is a checkout of PyTorch at the base release, or an installed tree: the folder that contains `torch/`, or that
`torch/` itself. The patches edit upstream's files; the modules of torch_overlay/ are copied to torch/_overlay/, their
text unchanged but for the import prefix, and taken out only if they still are what was copied. Only the files that the
series changes are looked at. Each must have the SHA-256 that base.json has for it; a tree that is dirty, or of another
release, is refused by the names of the files, and so is a series that is not what its own sums say. The tree has the
series or it does not: the new contents are all computed before the first file is touched, and an error puts back what
was written. One run works on a tree at a time; a run that was killed is rolled back by the next one, which says so (see
tree_change.py). Needs Python's standard library and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

from series import apply_change, base, FileChange, PatchFile, SeriesError, sha256, whole_series
from tree_change import is_locked, is_readable, locked, read_journal


Contents = dict[str, str | None]


def say(text: str, *, error: bool = False) -> None:
    """Prints a line. That nobody can read it is no failure of the run, whose status says how it ended."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python would fail again at its end


class AsWanted(SeriesError):
    """The tree is already what the run was to make it."""


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
    changes: dict[str, FileChange] = {}
    for patch in series:
        for change in patch.changes:
            changes.setdefault(change.path, change)
    if problems := [problem for change in changes.values() if (problem := linked(root, change))]:
        raise SeriesError(f"{root} has links in the way of the series:\n" + "\n".join(sorted(set(problems))))
    found: Contents = {}
    for name in changes:
        try:
            found[name] = (root / name).read_bytes().decode()
        except FileNotFoundError:
            found[name] = None
        except UnicodeDecodeError:
            raise SeriesError(f"{root / name}: not a file of the release, for it is no UTF-8") from None
    return found


def linked(root: Path, change: FileChange) -> str:
    """Why a file can't be changed where it is: '' if it can. A link inside of the tree stays one, and is followed.

    One that leads out of it may be shared by other trees. New files don't go where a link leads.
    """
    top = root / "torch"
    parts = Path(change.path).relative_to("torch").parts
    for count in range(len(parts)):
        path = top.joinpath(*parts[: count + 1])
        if path.is_symlink() and (change.is_new or not path.resolve().is_relative_to(top.resolve())):
            where = path.relative_to(root)
            return f"  {where}: a symbolic link to {path.readlink()}; put a copy of what it leads to in its place"
    return ""


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


def is_base(contents: Contents, series: list[PatchFile], root: Path) -> bool:
    """Is this the tree of the base release?"""
    try:
        check_base(contents, series, root)
    except SeriesError:
        return False
    return True


def is_applied(contents: Contents, series: list[PatchFile], root: Path) -> bool:
    """Is this the tree that applying the series gives?"""
    try:
        return is_base(transform(series, contents, reverse=True), series, root)
    except SeriesError:
        return False


def list_series(series: list[PatchFile]) -> None:
    for patch in series:
        say(patch.name)
        for change in patch.changes:
            say(f"  {'new ' if change.is_new else 'edit'} {change.path}")


def compute(root: Path, series: list[PatchFile], reverse: bool) -> tuple[Contents, Contents]:
    """Every file before and after. Refuses a tree that is not what it should be."""
    before = read(root, series)
    if reverse:
        if is_base(before, series, root):
            raise AsWanted(f"{root}: the series is not applied")
        after = transform(series, before, reverse)
        check_base(after, series, root)
        return before, after
    if is_applied(before, series, root):
        raise AsWanted(f"{root}: the series is applied already; --reverse takes it out")
    check_base(before, series, root)
    return before, transform(series, before, reverse)


def check(root: Path, reverse: bool) -> int:
    """Would it work? Changes nothing."""
    if is_locked(root):
        raise SeriesError(f"{root}: another run is at work on this tree")
    if (journal := read_journal(root)) is not None:
        raise SeriesError(
            f"{root}: an earlier run ({journal.action}) has not ended: its files are partly those before, partly those "
            "after the change; a run without --check rolls back first"
        )
    series = whole_series()
    _, after = compute(root, series, reverse)
    say(f"{len(series) - 1} patches would be {'reversed' if reverse else 'applied'}: {len(after)} files in {root}")
    return 0


def change(root: Path, reverse: bool) -> int:
    """Applies or reverses the series, after rolling back a run that was killed."""
    recovered = ""
    with locked(root) as tree:
        try:
            recovered = tree.recover()
            if recovered:
                say(recovered)
            series = whole_series()
            before, after = compute(root, series, reverse)
            tree.run("--reverse" if reverse else "apply", before, after)
        except (SeriesError, OSError) as error:
            if isinstance(error, AsWanted) and recovered:
                say(f"{error}: nothing else to do")
                return 0
            say(str(error), error=True)
            if not tree.journal.exists():
                say(f"Nothing {'else ' if recovered else ''}was changed.", error=True)
            elif is_readable(root):
                say("The tree is half changed; the next run of this tool puts it back first.", error=True)
            return 1
    say(f"{len(series) - 1} patches {'reversed' if reverse else 'applied'}: {len(after)} files in {root}")
    if reverse:
        with contextlib.suppress(OSError):  # the tree is as it was to be
            for path in leftovers(root, after):
                say(f"kept, for it is not of the series: {path}")
    return 0


def leftovers(root: Path, after: Contents) -> list[Path]:
    """What is in the way of removing the folders of files that are gone."""
    gone = {(root / name).parent for name, text in after.items() if text is None}
    return sorted(path for folder in gone if folder.is_dir() for path in folder.iterdir() if path not in gone)


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
        if options.list:
            list_series(whole_series())
            return 0
        root = tree_root(options.path)
        return check(root, options.reverse) if options.check else change(root, options.reverse)
    except (SeriesError, OSError) as error:
        say(str(error), error=True)
        say("Nothing was changed.", error=True)
        return 1


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any path can be printed, whatever the locale
    sys.exit(main(sys.argv[1:]))
