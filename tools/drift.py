#!/usr/bin/env python3
"""Reports what another PyTorch has changed under the overlay: each seam, each patch, each fix for upstream.

    python tools/drift.py PATH               a checkout, or a folder of packages with torch/ in it
    python tools/drift.py --torch 2.14.1     a release, whose wheel is downloaded and read, not installed
    python tools/drift.py --torch 2.14.1 --diff --out DIR     with the difference of each definition that changed

A seam's definition is unchanged, moved (it is word for word in another module), changed, or gone. The hunks of a patch
apply where they say, elsewhere in the file (their lines are there once), or not. The exit status is 1 if anything needs
work. The installed torch has to be the base. Nothing is imported from the other PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from series import base, installed_root, places_of, read_fixes, read_series, series_folder, SeriesError  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from series import FileChange
    from torch_overlay.seams import Seam

UNCHANGED, MOVED, CHANGED, GONE = "unchanged", "moved", "changed", "gone"
APPLIES, OFFSET, NEEDS_WORK = "applies", "applies with offset", "needs work"
FOLDERS = ("torch/_dynamo/", "torch/_functorch/", "torch/_inductor/", "torch/_higher_order_ops/", "torch/fx/")
CLOSE = 3  # names that are told where one is gone
MOST_NAMES = 6  # of functions that a changed definition calls


class Tree:
    """The Python files of a PyTorch: the paths of all, and the content of one."""

    def __init__(self, paths: Callable[[], Iterable[str]], content: Callable[[str], bytes]) -> None:
        self.paths, self.content = paths, content
        self.texts: dict[str, str | None] = {}

    def read(self, path: str) -> str | None:
        if path not in self.texts:
            try:
                self.texts[path] = self.content(path).decode()
            except (KeyError, OSError):  # not in the archive, not in the folder
                self.texts[path] = None
        return self.texts[path]

    def files(self) -> list[str]:
        return [path for path in self.paths() if path.startswith(FOLDERS) and path.endswith(".py")]


def download(version: str, folder: str) -> Path:
    """Download the wheel of a release. Raises SeriesError with pip's words."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "-d", folder, f"torch=={version}"], capture_output=True, text=True)
    found = sorted(Path(folder).glob("torch-*.whl"))
    if done.returncode or not found:
        raise SeriesError(f"torch {version} can't be downloaded: {done.stderr.strip()[-500:]}")
    return found[0]


def tree_of(path: Path) -> Tree:
    """Return the tree at a path: a wheel, a folder with torch/ in it, or torch/ itself."""
    if path.suffix == ".whl" and path.is_file():
        archive = zipfile.ZipFile(path)
        return Tree(archive.namelist, archive.read)
    roots = [path, path.parent] if path.name == "torch" else [path]
    root = next((root for root in roots if (root / "torch" / "_inductor").is_dir()), None)
    if root is None:
        raise SeriesError(
            f"{path} has no torch/_inductor: it takes a checkout, a folder of packages, or a wheel of torch"
        )
    paths = [file.relative_to(root).as_posix() for file in (root / "torch").rglob("*.py")]
    return Tree(lambda: paths, lambda name: (root / name).read_bytes())


# ---- seams


@dataclass
class SeamReport:
    target: str
    patch: str
    state: str
    said: str = ""
    diff: str = ""


class Seams:
    """Compares the definitions that seams stand for in two trees."""

    def __init__(self, old: Tree, new: Tree) -> None:
        self.old, self.new = old, new

    @functools.cached_property
    def _homes(self) -> dict[str, list[str]]:
        """Name of a class or function at the top of a module -> the files of the new tree that define it."""
        found: dict[str, list[str]] = {}
        for path in self.new.files():
            for node in _parsed(self.new.read(path) or "").body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.setdefault(node.name, []).append(path)
        return found

    def report(self, seam: Seam) -> SeamReport:
        path = file_of(self.new, seam.module) or ""
        report = SeamReport(seam.target, seam.patch or "overlay only", UNCHANGED)
        if seam.kind == "register":
            report.state, report.said = (UNCHANGED, "") if path else (GONE, f"there is no module {seam.module}")
            return report
        before = _text(self.old, file_of(self.old, seam.module) or "", *seam.definitions)
        after = _text(self.new, path, *seam.definitions)
        if after is None:
            return self._look_elsewhere(seam, report, path, before or "")
        if after != before:
            report.state = CHANGED
            report.said, report.diff = _compared(before or "", after, path)
        return report

    def _look_elsewhere(self, seam: Seam, report: SeamReport, path: str, before: str) -> SeamReport:
        top = seam.qualname.partition(".")[0]
        report.state, report.said = (
            GONE,
            f"there is no module {seam.module}" if not path else f"{path} has no {seam.qualname}",
        )
        for other in self._homes.get(top, ()):
            if other == path or (after := _text(self.new, other, *seam.definitions)) is None:
                continue
            where = f"it is in {other}"
            if after == before:
                report.state, report.said = MOVED, where
                return report
            report.state = CHANGED
            words, report.diff = _compared(before, after, other)
            report.said = f"{where}, and {words}"
        if report.state == GONE and path:
            close = difflib.get_close_matches(seam.qualname, list(_names(_parsed(self.new.read(path) or ""))), CLOSE)
            report.said += f"; names like it: {', '.join(close)}" if close else ""
        return report


def file_of(tree: Tree, module: str) -> str | None:
    """Return the source file of a module, if there is one."""
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if tree.read(path) is not None), None)


@functools.cache
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # of a newer Python
        return ast.Module([], [])


def _text(tree: Tree, path: str, *qualnames: str) -> str | None:
    """Return the text of definitions; None if the file doesn't have them."""
    from torch_overlay.seams import DefinitionNotFound, find_definition, segment

    text = tree.read(path) if path else None
    if text is None:
        return None
    try:
        return "\n".join(segment(text, find_definition(_parsed(text), name)) for name in qualnames)
    except DefinitionNotFound:
        return None


def _compared(before: str, after: str, path: str) -> tuple[str, str]:
    old, new = before.splitlines(True), after.splitlines(True)
    diff = list(difflib.unified_diff(old, new, "base", path))
    count = Counter(line[0] for line in diff[2:])
    first, second = (next((line for line in t if line.startswith(("def ", "async def "))), "") for t in (old, new))
    words = f"{count['-']} lines are gone, {count['+']} are new"
    if first and second and _signature(before) != _signature(after):
        words += ", and its parameters differ"
    were, are = _called(before), _called(after)
    words += "".join(
        f"; {said} {', '.join(sorted(names)[:MOST_NAMES])}{' ...' if len(names) > MOST_NAMES else ''}"
        for said, names in (("it calls no more", were - are), ("it calls newly", are - were))
        if names
    )
    return words, "".join(diff)


def _called(text: str) -> set[str]:
    """Return the names of the functions and methods that a definition calls."""
    calls = [node.func for node in ast.walk(_parsed(text)) if isinstance(node, ast.Call)]
    return {getattr(f, "attr", None) or getattr(f, "id", "") for f in calls} - {""}


def _signature(text: str) -> str:
    node = next((n for n in _parsed(text).body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    return ast.unparse(node.args) if node is not None else ""


def _names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}.{n.name}" for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
            )


# ---- patches


@dataclass
class PatchReport:
    name: str
    verdict: str = APPLIES
    said: list[str] = field(default_factory=list)


def check_patch(name: str, changes: Sequence[FileChange], texts: dict[str, str | None], tree: Tree) -> PatchReport:
    """Apply a patch to `texts`, the files as the patches before it left them, where its lines are found."""
    report = PatchReport(name)
    for change in changes:
        if change.path not in texts:
            texts[change.path] = tree.read(change.path)
        text = texts[change.path]
        if change.is_new:
            if text is not None:
                _worsen(report, NEEDS_WORK, f"{change.path} is there already")
            continue
        if text is None:
            _worsen(report, NEEDS_WORK, f"{change.path} is gone")
            continue
        lines, shift = text.split("\n"), 0
        for hunk in change.hunks:
            start, places = hunk.old_start - 1 + shift, places_of(hunk, lines)
            if start not in places and len(places) != 1:
                _worsen(report, NEEDS_WORK, f"{change.path}:{hunk.old_start}: its lines are not there once")
                continue
            at = start if start in places else places[0]
            if at != start:
                _worsen(report, OFFSET, "")
            lines[at : at + len(hunk.side("-"))] = hunk.side("+")
            shift = at - (hunk.old_start - 1) + len(hunk.side("+")) - len(hunk.side("-"))
        texts[change.path] = "\n".join(lines)
    return report


def _worsen(report: PatchReport, verdict: str, said: str) -> None:
    order = (APPLIES, OFFSET, NEEDS_WORK)
    report.verdict = max(report.verdict, verdict, key=order.index)
    if said:
        report.said.append(said)


# ---- the report


@dataclass(frozen=True)
class Report:
    seams: Sequence[SeamReport]
    queue: Sequence[PatchReport]  # the patches of the series
    fixes: Sequence[PatchReport]

    @property
    def needs_work(self) -> bool:
        return any(seam.state != UNCHANGED for seam in self.seams) or any(
            patch.verdict == NEEDS_WORK for patch in (*self.queue, *self.fixes)
        )

    def text(self, name: str, with_diffs: bool) -> str:
        counts = Counter(found.state for found in self.seams)
        states = ", ".join(f"{counts[state]} {state}" for state in (UNCHANGED, MOVED, CHANGED, GONE))
        lines = [f"{name}, against the base {base()['tag']}", "", f"{len(self.seams)} seams: {states}"]
        for found in self.seams:
            if found.state != UNCHANGED:
                lines += [f"  {found.state:9} {found.target}  [{found.patch}]", f"            {found.said}"]
                lines += [f"            {line}" for line in found.diff.splitlines()] if with_diffs else []
        parts = (
            ("patches of the series, one after the other", self.queue),
            ("fixes for upstream, each on those that it needs", self.fixes),
        )
        for title, patches in parts:
            lines += ["", f"{title}:"]
            for patch in patches:
                lines += [f"  {patch.verdict:19} {patch.name}", *[f"                      {s}" for s in patch.said]]
        return "\n".join(lines)


def compare(new: Tree) -> Report:
    """Compare all seams and patches with another PyTorch."""
    from torch_overlay.seam_table import SEAMS

    seams = Seams(tree_of(installed_root()), new)
    texts: dict[str, str | None] = {}
    queue = [check_patch(patch.name, patch.changes, texts, new) for patch in read_series(series_folder())]
    fixes, known = [], read_fixes()
    for name, fix in known.items():
        texts = {}
        for other in fix.needs:
            check_patch(other, known[other].changes, texts, new)
        fixes.append(check_patch(name, fix.changes, texts, new))
    return Report([seams.report(hook) for seam in SEAMS for hook in seam.hooks], queue, fixes)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--torch", metavar="VERSION")
    parser.add_argument("--diff", action="store_true", help="show what changed in each definition")
    parser.add_argument("--out", type=Path, help="folder for the report with all differences")
    options = parser.parse_args(argv)
    if (options.path is None) == (options.torch is None):
        parser.error("it takes a path, or --torch VERSION")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = download(options.torch, folder) if options.torch else options.path
            name = f"torch {options.torch}" if options.torch else str(options.path)
            found = compare(tree_of(path))
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "drift.txt").write_text(found.text(name, True) + "\n")
    except SeriesError as error:
        print(error, file=sys.stderr)
        return 2
    print(found.text(name, options.diff))
    return 1 if found.needs_work else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
