"""Changes several files of a tree as one: all of them or none, whatever ends the process on the way.

A run that changes the tree works in the folder `torch/.apply_patches`, which is gone when the run has ended:

    lock       held by the run that is at work; the kernel releases it when the process ends, however it ends
    new/       the files as they will be, complete and on the disk
    old/       the originals: hard links, or copies where the file system has no links
    journal    the SHA-256 that each file had and will have

Note [A journal stands for a change that has not ended]
The journal is written last, and no file of the tree is touched before the disk has it. From there on every file changes
in one step, a rename or a removal. When the disk has all of them, the journal is removed, and that ends the change. A
run that finds a journal therefore holds the lock of a run that was killed, and rolls back first: a file that is not as
it was is replaced by its original. Each step of rolling back can be repeated, so that this may be killed, too. Without
a journal the tree is whole, and the folder holds nothing of worth.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from series import is_of_tree, SeriesError, sha256


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FOLDER = ".apply_patches"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Step:
    """One file, and its SHA-256 before and after the change; None stands for no file."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Journal:
    """A change that was begun."""

    action: str
    steps: tuple[Step, ...]


def digest(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes())
    except FileNotFoundError:
        return None


def write_to_disk(path: Path, content: bytes) -> None:
    """Creates a file; the disk has it when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """The disk has the names in a folder when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system can't
            raise
    finally:
        os.close(descriptor)


def find_folder(root: Path) -> Path:
    folder = root / "torch" / FOLDER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise SeriesError(f"{folder} is {'a symbolic link' if folder.is_symlink() else 'a file'}: remove it")
    return folder


def read_journal(root: Path) -> Journal | None:
    """The journal of a change that has not ended."""
    path = find_folder(root) / "journal"
    try:
        record = json.loads(path.read_bytes())
        steps = tuple(Step(**step) for step in record["steps"])
        if not all(is_of_tree(step.path) for step in steps):
            raise ValueError(steps)
        return Journal(record["action"], steps)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SeriesError(
            f"{path} cannot be read. Copy the files of {path.parent / 'old'} back to {root}, then remove {path.parent}"
        ) from None


def is_readable(root: Path) -> bool:
    """Is there a journal, by which a run can roll back?"""
    try:
        return read_journal(root) is not None
    except SeriesError:
        return False


def is_locked(root: Path) -> bool:
    """Is a run at work on the tree? Changes nothing."""
    try:
        descriptor = os.open(find_folder(root) / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP arrive when the block has ended: it takes a moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_lock(folder: Path) -> int:
    """Waits until no other run works on the tree. Returns the descriptor that holds the lock."""
    path, said = folder / "lock", False
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the run before this one has removed the folder
            continue
        try:
            if not said:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print("Another run is at work on this tree: waiting for it.", file=sys.stderr)
                    said = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the lock of a run that has ended


@contextlib.contextmanager
def locked(root: Path) -> Iterator[TreeChange]:
    """The tree is this run's alone inside of the block."""
    folder = find_folder(root)
    try:
        descriptor = take_lock(folder)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    with signals_wait():
        change = TreeChange(root, folder)
        try:
            yield change
        finally:
            if not change.journal.exists():
                change.discard()
            os.close(descriptor)


class TreeChange:
    """What a run that holds the lock may do to the tree."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.journal = folder / "journal"
        self.old = folder / "old"
        self.new = folder / "new"

    def discard(self) -> None:
        """Removes the folder, the lock last. What can't be removed does no harm: the next run tries again."""
        with contextlib.suppress(OSError):
            for folder in (self.new, self.old):
                if folder.exists():
                    shutil.rmtree(folder)
            for name in ("journal.new", "lock"):
                (self.journal.parent / name).unlink(missing_ok=True)
            self.journal.parent.rmdir()

    def recover(self) -> str:
        """Rolls back a run that was killed. Returns what it did: '' if there was none."""
        journal = read_journal(self.root)
        if journal is None:
            return ""
        changed = self.roll_back(journal)
        return (
            f"An earlier run ({journal.action}) had not ended: {changed} of {len(journal.steps)} files were put back."
        )

    def run(self, action: str, before: Mapping[str, str | None], after: Mapping[str, str | None]) -> None:
        """Writes every file whose text changes, or none."""
        names = sorted(name for name in after if after[name] != before[name])
        steps = [Step(name, *(None if t is None else sha256(t) for t in (before[name], after[name]))) for name in names]
        begun: list[Step] = []
        self.stage(steps, after)
        try:
            self.write_journal(Journal(action, tuple(steps)))
            for step in steps:
                if digest((self.root / step.path).resolve()) != step.before:
                    raise SeriesError(f"{self.root / step.path}: changed while the tool was at work")
                begun.append(step)
                self.do(step)
            self.end(steps, after=True)
        except BaseException:
            self.roll_back(Journal(action, tuple(begun)))
            raise

    def stage(self, steps: Sequence[Step], after: Mapping[str, str | None]) -> None:
        """Puts the originals and the new files into the folder, on the disk."""
        for folder in (self.new, self.old):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        for step in steps:
            path, old, new = self.root / step.path, self.old / step.path, self.new / step.path
            text = after[step.path]
            if step.before is not None:
                old.parent.mkdir(parents=True, exist_ok=True)
                save(path.resolve(), old)
            if text is not None:
                new.parent.mkdir(parents=True, exist_ok=True)
                write_to_disk(new, text.encode())
                if step.before is not None:
                    shutil.copymode(path, new)
        for top in (self.new, self.old):
            for folder, _, _ in os.walk(top):
                sync_folder(Path(folder))

    def write_journal(self, journal: Journal) -> None:
        staged = self.journal.with_name("journal.new")
        staged.unlink(missing_ok=True)
        write_to_disk(staged, json.dumps(asdict(journal), indent=1).encode())
        sync_folder(self.root / "torch")
        os.replace(staged, self.journal)
        sync_folder(self.journal.parent)

    def do(self, step: Step) -> None:
        path = (self.root / step.path).resolve()
        if step.after is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.new / step.path, path)

    def roll_back(self, journal: Journal) -> int:
        """Gives every file that the change has touched its original. Returns how many there were.

        A file that neither the tree nor the change has put there is the user's. In the place of a new file it stays;
        in the place of an original it must be looked at first.
        """
        touched, edited = [], []
        for step in journal.steps:
            path, old = self.root / step.path, self.old / step.path
            now, kept = digest(path.resolve()), step.before is None or digest(old) == step.before
            if now == step.before:
                continue
            if now in (None, step.after) and kept:
                touched.append(step)
            elif step.before is not None:
                edited.append(f"  {path}: edited since; its original is {old if kept else 'lost'}")
        if edited:
            raise SeriesError(
                f"{self.root}: an earlier run ({journal.action}) has not ended, and cannot be rolled back:\n"
                + "\n".join(edited)
                + f"\nCopy the originals back and run this again, or remove {self.old.parent} if the tree is a new one"
            )
        for step in reversed(touched):
            path = (self.root / step.path).resolve()
            if step.before is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.old / step.path, path)
        self.end(journal.steps, after=False)
        return len(touched)

    def end(self, steps: Sequence[Step], after: bool) -> None:
        """The change, or its rolling back, has come to an end: the disk has it before the journal goes."""
        gone = [step.path for step in steps if (step.after if after else step.before) is None]
        remove_empty_folders(self.root, gone)
        folders = {(self.root / step.path).resolve().parent for step in steps}
        for folder in sorted({next(f for f in (folder, *folder.parents) if f.is_dir()) for folder in folders}):
            sync_folder(folder)
        self.journal.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has ended; a journal that comes back after a power cut rolls back
            sync_folder(self.journal.parent)


def save(path: Path, old: Path) -> None:
    """Keeps the original: a link to it, so that putting it back needs no space, or else a copy."""
    try:
        os.link(path, old)
    except OSError:
        write_to_disk(old, path.read_bytes())
        shutil.copystat(path, old)


def is_bytecode(path: Path) -> bool:
    """A folder of Python's bytecode, with nothing else in it."""
    if path.name != "__pycache__" or path.is_symlink() or not path.is_dir():
        return False
    return all(".pyc" in entry.suffixes for entry in path.iterdir())


def remove_empty_folders(root: Path, gone: Sequence[str]) -> None:
    """Removes the folders that files which are gone have left, and the bytecode that Python put there."""
    folders = {folder for name in gone for folder in (root / name).parents if root in folder.parents}
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        if folder.is_dir() and folder != root / "torch" and all(is_bytecode(entry) for entry in folder.iterdir()):
            shutil.rmtree(folder)
