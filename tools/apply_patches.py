#!/usr/bin/env python
"""Applies the patch series to a PyTorch tree with the modules that it needs, or takes both back out.

    python tools/apply_patches.py PATH              apply
    python tools/apply_patches.py --check PATH      would it apply? (with --reverse: would it come out?) Changes nothing
    python tools/apply_patches.py --reverse PATH    restore the tree, byte for byte
    python tools/apply_patches.py --list            the patches, in order, with the files that each changes

PATH is a checkout of PyTorch at the base release, or an installed tree: the folder that contains `torch/`, or that
`torch/` itself. The patches edit upstream's files; the modules of torch_overlay/ are copied to torch/_overlay/, their
text unchanged but for the import prefix, and taken out only if they still are what was copied. Only the files that the
series changes are looked at. A tree that is dirty, or of a different release, is refused by the names of the files, and
so is a series that is not what its own sums say. Needs Python's standard library and nothing else.

Note [A file has the series or not]
Each file is replaced in one step, by a rename, and what it holds says whether it has the series: it has the SHA-256
that base.json has for it, or it has it once the patches are taken out. So a run that was killed leaves a tree of which
some files have the series, and the next run changes the others, or these back. All new contents are computed and on the
disk before the first file is touched, and an error puts back what was replaced. One run works on a tree at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import io
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from series import apply_change, base, FileChange, PatchFile, SeriesError, sha256, whole_series


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STAGING = ".apply_patches"  # how the name of a folder with the new files and the originals begins


@dataclass(frozen=True)
class File:
    """A file that the series changes: its text now, and what it is without and with the series. None: no file."""

    path: str
    now: str | None
    without: str | None
    patched: str | None


class AsWanted(SeriesError):
    """The tree is already what the run was to make it."""


class HalfChanged(SeriesError):
    """Neither could all files be changed, nor could all be put back."""


def say(text: str, *, error: bool = False) -> None:
    """Prints a line. That nobody can read it is no failure of the run, whose status says how it ended."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python would fail again at its end


def tree_root(path: Path) -> Path:
    """The folder that contains torch/."""
    path = path.absolute()
    if (path / "torch").is_dir():
        return path
    if path.name == "torch" and path.is_dir():
        return path.parent
    raise SeriesError(f"{path}: neither a folder that contains torch/, nor a torch/ folder")


def read(root: Path, series: Sequence[PatchFile]) -> list[File]:
    """Return every file that the series changes. Raises SeriesError if one is neither as in the base release, nor as
    the series makes it."""
    changes: dict[str, list[FileChange]] = {}
    for change in (change for patch in series for change in patch.changes):
        changes.setdefault(change.path, []).append(change)
    if problems := [problem for each in changes.values() if (problem := linked(root, each[0]))]:
        raise SeriesError(f"{root} has links in the way of the series:\n" + "\n".join(sorted(set(problems))))
    record = base()
    expected = record["files"]
    assert isinstance(expected, dict)
    files, problems = [], []
    for path, each in sorted(changes.items()):
        try:
            now = (root / path).read_bytes().decode()
        except FileNotFoundError:
            now = None
        except UnicodeDecodeError:
            raise SeriesError(f"{root / path}: not a file of the release, for it is no UTF-8") from None
        found = versions(path, each, now, expected.get(path, "none"))
        problems += [f"  {path}: {found}"] if isinstance(found, str) else []
        files += [found] if isinstance(found, File) else []
    if problems:
        raise SeriesError(
            f"{root} is no tree of PyTorch {record['tag']}, with the series or without:\n" + "\n".join(problems)
        )
    return files


def versions(path: str, changes: Sequence[FileChange], now: str | None, expected: str) -> File | str:
    """Return a file without and with the series, or why it is neither: Note [A file has the series or not]."""

    def after(text: str | None, reverse: bool = False) -> str | None:
        for change in reversed(changes) if reverse else changes:
            text = apply_change(change, text, reverse)
        return text

    if changes[0].is_new:
        patched = after(None)
        return (
            File(path, now, None, patched) if now in (None, patched) else "exists already, and is not the series' own"
        )
    if now is None:
        return "no such file"
    if sha256(now) == expected:
        return File(path, now, now, after(now))
    with contextlib.suppress(SeriesError):
        without = after(now, reverse=True)
        if without is not None and sha256(without) == expected:
            return File(path, now, without, now)
    return f"SHA-256 {sha256(now)[:16]}…, the base has {expected[:16]}…"


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


def list_series(series: list[PatchFile]) -> None:
    for patch in series:
        say(patch.name)
        for change in patch.changes:
            say(f"  {'new ' if change.is_new else 'edit'} {change.path}")


@contextlib.contextmanager
def locked(root: Path, check: bool = False) -> Iterator[None]:
    """The tree is this run's alone inside of the block; the kernel ends the lock with the process. A check doesn't wait
    for a run that changes the tree: it raises SeriesError."""
    descriptor = os.open(root / "torch", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kind = fcntl.LOCK_SH if check else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if check:
                raise SeriesError(f"{root}: another run is at work on this tree") from None
            say("Another run is at work on this tree: waiting for it.", error=True)
            fcntl.flock(descriptor, kind)
        except OSError as error:
            if error.errno != errno.EBADF:  # NFS locks what is open for writing, as no folder can be
                raise
        yield
    finally:
        os.close(descriptor)


def write(root: Path, texts: Mapping[str, str | None]) -> None:
    """Give each file its text; None removes it. An error changes none of them, or is HalfChanged."""
    with tempfile.TemporaryDirectory(prefix=STAGING, dir=root / "torch", ignore_cleanup_errors=True) as folder:
        paths = [(root / path).resolve() for path in texts]
        staged = [stage(path, texts[name], Path(folder, str(i))) for i, (path, name) in enumerate(zip(paths, texts))]
        try:
            for path, (new, _) in zip(paths, staged):
                if new is None:
                    path.unlink()
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(new, path)
        except BaseException as error:
            try:
                for path, (new, old) in zip(paths, staged):
                    if not (path if new is None else new).exists():  # it was changed
                        os.replace(old, path) if old.exists() else path.unlink()
            except OSError:
                raise HalfChanged(str(error)) from error
            raise


def stage(path: Path, text: str | None, place: Path) -> tuple[Path | None, Path]:
    """Return where the file's new text is, on the disk, and where its original is: a link to it, or a copy."""
    new, old = place.with_suffix(".new"), place.with_suffix(".old")
    if path.exists():
        try:
            os.link(path, old)
        except OSError:  # the file system has no links
            shutil.copy2(path, old)
    if text is None:
        return None, old
    with new.open("xb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    if old.exists():
        shutil.copymode(old, new)
    return new, old


def tidy(root: Path, files: Sequence[File]) -> None:
    """Remove what a run that was killed has left, and the folders of files that are gone with Python's bytecode."""
    for path in (root / "torch").glob(f"{STAGING}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    gone = [root / file.path for file in files if not (root / file.path).exists()]
    folders = {folder for path in gone for folder in path.parents if root / "torch" in folder.parents}
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        if folder.is_dir() and all(is_bytecode(entry) for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def is_bytecode(path: Path) -> bool:
    """True for a folder of Python's bytecode with nothing else in it."""
    if path.name != "__pycache__" or path.is_symlink() or not path.is_dir():
        return False
    return all(".pyc" in entry.suffixes for entry in path.iterdir())


def compute(root: Path, files: Sequence[File], reverse: bool) -> tuple[dict[str, str | None], str]:
    """Return the text of each file that the run changes, and how far a run came that has not ended. Raises AsWanted if
    there is nothing to change."""
    texts = {f.path: f.without if reverse else f.patched for f in files}
    texts = {f.path: texts[f.path] for f in files if texts[f.path] != f.now}
    if not texts:
        is_so = "not applied" if reverse else "applied already; --reverse takes it out"
        raise AsWanted(f"{root}: the series is {is_so}")
    count = len(texts) if reverse else len(files) - len(texts)
    return texts, f"{count} of {len(files)} files have the series" if len(texts) < len(files) else ""


def check(root: Path, reverse: bool) -> int:
    """Would it work? Changes nothing."""
    series = whole_series()
    with locked(root, check=True):
        texts, unfinished = compute(root, read(root, series), reverse)
    if unfinished:
        raise SeriesError(
            f"{root}: an earlier run has not ended, {unfinished}; a run without --check goes on from there"
        )
    say(f"{len(series) - 1} patches would be {'reversed' if reverse else 'applied'}: {len(texts)} files in {root}")
    return 0


def change(root: Path, reverse: bool) -> int:
    """Applies or reverses the series, from where a run that was killed has left it."""
    series = whole_series()
    with locked(root):
        files = read(root, series)
        try:
            texts, unfinished = compute(root, files, reverse)
            if unfinished:
                say(f"An earlier run had not ended: {unfinished}.")
            write(root, texts)
        finally:
            tidy(root, files)
        say(f"{len(series) - 1} patches {'reversed' if reverse else 'applied'}: {len(texts)} files in {root}")
        for path in leftovers(root, files) if reverse else ():
            say(f"kept, for it is not of the series: {path}")
    return 0


def leftovers(root: Path, files: Sequence[File]) -> list[Path]:
    """What is in the way of removing the folders of files that are gone."""
    gone = {(root / file.path).parent for file in files if file.without is None}
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
        half = "The tree is half changed; the next run of this tool, with or without --reverse, goes on from there."
        say(half if isinstance(error, HalfChanged) else "Nothing was changed.", error=True)
        return 1


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any path can be printed, whatever the locale
    sys.exit(main(sys.argv[1:]))
