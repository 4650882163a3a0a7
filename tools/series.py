"""Reading, applying and writing the patch series: strict unified diffs in the git dialect, no fuzz, no offsets.

A series is the patches, the file `series` with their order, and `SHA256SUMS` of all of them, as `sha256sum -c` reads
it. A series that was truncated, garbled or exported in part is refused before it is parsed. All text is UTF-8.

A patch file is a header (free text, `Field: value` lines first) followed by one diff per file. Of the git dialect the
series needs two things only: insertions and deletions in a file that exists, and new files. A hunk applies where it
says and nowhere else, and every context line must match.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "torch_overlay" / "base.json"
SUMS = "SHA256SUMS"
CONTEXT = 3
RESTORE = "restore it from version control, or write it with tools/fingerprint.py --write"
AUTHOR = "torch_overlay <torch-overlay@users.noreply.github.com>"
DATE = "Thu, 1 Jan 2026 00:00:00 +0000"  # the same at each export
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class SeriesError(Exception):
    """A patch, or the tree that it is applied to, is not what it should be. The message names the file."""


@dataclass(frozen=True)
class Hunk:
    old_start: int
    new_start: int
    lines: tuple[str, ...]  # each with its leading " ", "+" or "-", without line end

    def side(self, other: str) -> list[str]:
        """The lines before ("-") or after ("+") the change."""
        return [line[1:] for line in self.lines if line[0] in (" ", other)]


@dataclass(frozen=True)
class FileChange:
    path: str
    is_new: bool
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class PatchFile:
    name: str
    header: str
    changes: tuple[FileChange, ...]


def installed_root() -> Path:
    """The folder that holds the installed `torch/`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed in this Python: install the release that base.json names")
    return Path(spec.origin).parent.parent


def base() -> dict[str, object]:
    """The pinned base: the tag and the SHA-256 of every file that the series changes."""
    try:
        record = json.loads(BASE.read_bytes())
    except NotADirectoryError:
        raise SeriesError(f"{BASE} is inside of an archive: unpack it, and run the tool from there") from None
    except (OSError, ValueError) as error:
        raise SeriesError(f"{BASE} cannot be read: {error}; {RESTORE}") from None
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("tag"), str)
        or not isinstance(record.get("files"), dict)
    ):
        raise SeriesError(f"{BASE} has no tag or no files; {RESTORE}")
    return record


def series_folder() -> Path:
    return ROOT / "patches" / str(base()["tag"])


def sha256(content: str | bytes) -> str:
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()


def sums(files: Mapping[str, str]) -> str:
    """The text of SHA256SUMS for the files of a series."""
    return "".join(f"{sha256(text)}  {name}\n" for name, text in files.items())


def read_series(folder: Path) -> list[PatchFile]:
    """The patches that `series` lists, in its order. Every file must be what SHA256SUMS says."""
    expected = dict(line.split("  ", 1)[::-1] for line in read_part(folder, SUMS).splitlines() if "  " in line)

    def verified(name: str) -> str:
        text = read_part(folder, name)
        if sha256(text) != expected.pop(name, None):
            raise broken(f"{name} is not what {SUMS} says", folder)
        return text

    names = verified("series").splitlines()
    patches = [parse_patch(name, verified(name)) for name in names]
    if expected:
        raise broken(f"{', '.join(expected)}: in {SUMS}, not in the series", folder)
    return patches


def read_part(folder: Path, name: str) -> str:
    """The text of one file of a series, whatever the locale."""
    try:
        return (folder / name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise broken(f"{name} cannot be read: {error}", folder) from None


def broken(what: str, folder: Path) -> SeriesError:
    return SeriesError(
        f"{folder}: {what}. Restore the series from version control, or write it with tools/export_patches.py"
    )


def is_of_tree(path: str, roots: tuple[str, ...] = ("torch/",)) -> bool:
    """Is the path in one of the folders?"""
    return path.startswith(roots) and ".." not in path


def parse_patch(name: str, text: str, roots: tuple[str, ...] = ("torch/",)) -> PatchFile:
    """Read a patch. Raises SeriesError if it changes a file outside of the folders `roots`, or can't be read."""
    header, *diffs = re.split(r"(?m)^diff --git ", text)
    changes = []
    for diff in diffs:
        lines = diff.split("\n")
        match = re.fullmatch(r"a/(\S+) b/(\S+)", lines[0])
        if match is None or match[1] != match[2] or not is_of_tree(match[1], roots):
            raise SeriesError(f"{name}: cannot read the diff of {lines[0]!r}")
        is_new = lines[1:2] == ["new file mode 100644"]
        changes.append(FileChange(match[1], is_new, tuple(parse_hunks(name, lines))))
        if not is_new and not changes[-1].hunks:
            raise SeriesError(f"{name}: the diff of {match[1]} has no hunk")
    return PatchFile(name, header, tuple(changes))


def parse_hunks(name: str, lines: Sequence[str]) -> Iterator[Hunk]:
    position = next((i for i, line in enumerate(lines) if line.startswith("@@")), len(lines))
    while position < len(lines) and (match := HUNK.match(lines[position])):
        old_left, new_left = int(match[2] or 1), int(match[4] or 1)
        body = []
        while old_left or new_left:
            position += 1
            line = lines[position] if position < len(lines) else ""
            if line[:1] not in (" ", "+", "-"):
                raise SeriesError(f"{name}: the hunk {match[0]!r} of {lines[0]!r} ends early")
            old_left -= line[0] in " -"
            new_left -= line[0] in " +"
            body.append(line)
        yield Hunk(int(match[1]), int(match[3]), tuple(body))
        position += 1
    if any(lines[position:]):
        raise SeriesError(f"{name}: cannot read {lines[position]!r} in the diff of {lines[0]!r}")


def apply_change(change: FileChange, content: str | None, reverse: bool = False) -> str | None:
    """The file after the change (or before it, in reverse); None stands for a file that does not exist."""
    before, after = ("+", "-") if reverse else ("-", "+")
    if change.is_new:
        there, wanted = (None, file_of(change)) if not reverse else (file_of(change), None)
        if content != there:
            state = "exists already" if not reverse else "is missing" if content is None else "was edited"
            raise SeriesError(f"{change.path}: {state}")
        return wanted
    if content is None:
        raise SeriesError(f"{change.path}: no such file")
    lines = content.split("\n")
    result: list[str] = []
    done = 0
    for hunk in change.hunks:
        start = (hunk.new_start if reverse else hunk.old_start) - 1
        old = hunk.side(before)
        if lines[start : start + len(old)] != old:
            raise SeriesError(f"{change.path}: line {start + 1} is not what the patch expects")
        result += lines[done:start] + hunk.side(after)
        done = start + len(old)
    return "\n".join(result + lines[done:])


def file_of(change: FileChange) -> str:
    """The text of a file that a change creates."""
    return "".join(line + "\n" for hunk in change.hunks for line in hunk.side("+"))


def mail(title: str, message: str) -> str:
    """Return the beginning of a patch that `git am --keep-non-patch` makes a commit of."""
    head = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: {AUTHOR}\nDate: {DATE}\nSubject: [PATCH] {title}\n"
    return f"{head}\n{message}\n---\n\n"


def new_file_diff(path: str, content: str) -> str:
    """The diff that creates a file."""
    lines = content.split("\n")
    if lines.pop() != "":
        raise SeriesError(f"{path}: does not end with a line break")
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
    if not lines:
        return f"{head}index 0000000..e69de29\n"  # git wants this line for an empty file
    body = "".join(f"+{line}\n" for line in lines)
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{body}"


def insertion_diff(path: str, content: str, inserted: Mapping[int, Sequence[str]]) -> str:
    """The diff that inserts lines into a file; `inserted` maps a line number, from 0, to the lines put before it."""
    lines = content.split("\n")
    if lines.pop() != "":
        raise SeriesError(f"{path}: does not end with a line break")
    groups: list[list[int]] = []
    for position in sorted(inserted):
        if groups and position - groups[-1][-1] <= 2 * CONTEXT:
            groups[-1].append(position)
        else:
            groups.append([position])
    text = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
    shift = 0
    for group in groups:
        start, end = max(0, group[0] - CONTEXT), min(len(lines), group[-1] + CONTEXT)
        added = sum(len(inserted[position]) for position in group)
        text += f"@@ -{start + 1},{end - start} +{start + 1 + shift},{end - start + added} @@\n"
        for position in range(start, end + 1):
            text += "".join(f"+{line}\n" for line in inserted.get(position, ()) if position in group)
            if position < end:
                text += f" {lines[position]}\n"
        shift += added
    return text
