"""Reading, applying and writing the patch series: strict unified diffs in the git dialect, no fuzz, no offsets.

A series is the patches, the file `series` with their order, and `SHA256SUMS` of all of them, as `sha256sum -c` reads
it. A series that was truncated, garbled or exported in part is refused before it is parsed. All text is UTF-8.

The patches change upstream's own files only. The modules that they import are those of torch_overlay/, copied to
torch/_overlay/ with the import prefix of that place: there is one text of them.

A patch file is a header (free text, `Field: value` lines first) followed by one diff per file. Of the git dialect the
series needs two things only: insertions and deletions in a file that exists, and new files. A hunk applies where it
says and nowhere else, and every context line must match.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "torch_overlay" / "base.json"
MODULES = "torch_overlay to torch/_overlay"  # stands for a patch in messages
# Parts of the package that only the overlay form has: the engine and the demonstration, which compares it with stock.
ENGINE = ("__main__.py", "seams.py", "seam_table.py", "errors.py", "base.json", "_engine")
ENGINE += ("_cli/demo.py", "_cli/status.py")
SUMS = "SHA256SUMS"
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


def travel(text: str) -> str:
    """Return the text of one of our modules with the import prefix of the patched form."""
    text = re.sub(r"\btorch_overlay(?=\.\w)", "torch._overlay", text)
    return re.sub(r"\bfrom torch_overlay import\b", "from torch._overlay import", text)


def modules() -> PatchFile:
    """Return the modules that the series copies, as a patch of new files. The package's `__init__` is another one."""
    package = ROOT / "torch_overlay"
    found: dict[str, Path] = {}
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and not {name, name.partition("/")[0]} & {*ENGINE}:
            found[name] = package / "_engine" / "patched_init.py" if name == "__init__.py" else path
    try:
        texts = {f"torch/_overlay/{name}": travel(path.read_bytes().decode()) for name, path in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise SeriesError(f"{package}: a module cannot be read: {error}") from None
    return PatchFile(MODULES, "", tuple(new_file(name, text) for name, text in texts.items()))


@dataclass(frozen=True)
class Fix:
    """A fix of a bug of PyTorch's, as it could be sent upstream: edits of its files and a test."""

    path: Path
    needs: tuple[str, ...]  # names of the fixes that it is made on top of
    changes: tuple[FileChange, ...]

    @property
    def tests(self) -> dict[str, str]:
        """Path -> text, of its new tests."""
        return {c.path: file_of(c) for c in self.changes if c.is_new and c.path.startswith("test/")}


def read_fixes() -> dict[str, Fix]:
    """Return the fixes of patches/TAG/upstream, each after those that it needs. They are edited by hand."""
    folder = series_folder() / "upstream"
    found: dict[str, Fix] = {}
    for line in read_part(folder, "series").splitlines():
        name, *needs = line.partition("#")[0].split() or [""]
        if name:
            if missing := [other for other in needs if other not in found]:
                raise SeriesError(f"{folder / 'series'}: {name} needs {', '.join(missing)}, which is not above it")
            changes = parse_patch(name, read_part(folder, name), ("torch/", "test/")).changes
            found[name.removesuffix(".patch")] = Fix(folder / name, tuple(needs), changes)
    return found


def fixed(fixes: Sequence[Fix], root: Path) -> dict[str, str]:
    """Return path -> text, of the files of a tree that the fixes change, each applied after those before it."""
    texts: dict[str, str | None] = {}
    for change in (change for fix in fixes for change in fix.changes):
        if change.path not in texts:
            texts[change.path] = None if change.is_new else (root / change.path).read_text()
        texts[change.path] = apply_change(moved(change, texts[change.path]), texts[change.path])
    return {path: text for path, text in texts.items() if text is not None}


def moved(change: FileChange, text: str | None) -> FileChange:
    """Return the change with each hunk at the nearest place with its lines, as git does: fixes may be applied in any
    order. A hunk whose lines are nowhere stays.
    """
    lines = (text or "").split("\n")
    hunks, shift = [], 0
    for hunk in change.hunks if not change.is_new else ():
        expected = hunk.old_start - 1 + shift
        place = min(places_of(hunk, lines), key=lambda i: abs(i - expected), default=hunk.old_start - 1)
        shift = place - (hunk.old_start - 1)
        hunks.append(replace(hunk, old_start=place + 1))
    return change if change.is_new else replace(change, hunks=tuple(hunks))


def places_of(hunk: Hunk, lines: Sequence[str]) -> list[int]:
    """Return where a file has the lines that a hunk is made for."""
    old = hunk.side("-")
    return [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]


def whole_series() -> list[PatchFile]:
    """Return the modules and the patches: all that applying changes."""
    return [modules(), *read_series(series_folder())]


def new_file(path: str, content: str) -> FileChange:
    """Return the change that creates a file. Raises SeriesError if its last line doesn't end."""
    *lines, rest = content.split("\n")
    if rest:
        raise SeriesError(f"{path}: does not end with a line break")
    return FileChange(path, True, (Hunk(0, 1, tuple(f"+{line}" for line in lines)),) if lines else ())


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


def new_file_diff(change: FileChange) -> str:
    """Return the diff that creates a file."""
    path = change.path
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
    if not change.hunks:
        return f"{head}index 0000000..e69de29\n"  # git wants this line for an empty file
    lines = change.hunks[0].lines
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"{n}\n" for n in lines)


def edit_diff(path: str, before: str, after: str) -> str:
    """Return the diff of a file that exists. Raises SeriesError if its last line doesn't end."""
    if not before.endswith("\n"):
        raise SeriesError(f"{path}: does not end with a line break")
    old, new = ([f"{line}\n" for line in text.split("\n")[:-1]] for text in (before, after))
    return f"diff --git a/{path} b/{path}\n" + "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))
