#!/usr/bin/env python3
"""Writes the landing stack: one patch a pull request, as edits of upstream's files with their tests.

    python tools/export_upstream.py            write patches/v2.15.0/upstream/*.patch and the file series
    python tools/export_upstream.py --check    status 1 if a file is not what would be written
    python tools/export_upstream.py --list     the pull requests, with their sizes and what they need

A pull request is declared by a folder beside its patch:

    pull_request.toml    title, message, the pull requests that it needs (`needs`), the seams and modules of the overlay
                         that it makes needless, and where its tests go in upstream's tree
    edits.patch          the edits of upstream's files, made by hand: a condition in a function instead of a wrap
    test_*.py            its tests, in upstream's style

New files whose text is that of the overlay's modules are listed under [files]: the path in upstream's tree, and the
module. Their imports of one another, and of modules that the needed pull requests add, are renamed; so are the names of
modules in their comments, and the names of the group of torch._dynamo's counters and of the log. The text is formatted
as upstream's. A source of C is listed by its path. Under [names] stands what edits of upstream's files add, and the
module of the overlay that has the same names.

    python tools/export_upstream.py --imports MODULE...     what a pull request of these modules would pull in: lines
                                                            of each, and what it imports; a package is its modules

The tool applies the edits to the installed tree of the base, with what the pull request needs applied before, and
writes the difference with its tests and its message, as `git am --keep-non-patch` reads it. It refuses edits that
mention the overlay, new files that import a module which isn't listed or name such a module, a seam that is not in the
seam table or whose module isn't declared, a test that is missing, lines that are longer than upstream's, and more than
800 lines.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TYPE_CHECKING


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from series import (  # noqa: E402
    apply_change,
    installed_root,
    mail,
    new_file_diff,
    parse_patch,
    series_folder,
    SeriesError,
)


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from series import FileChange

DECLARATION, EDITS = "pull_request.toml", "edits.patch"
MOST_LINES = 800
TITLE, LINE, CODE = 72, 80, 88  # characters of a title, a line of a message, a line of upstream's code
PYTHON = "py311"  # the oldest that upstream supports
ROOTS = ("torch/", "test/")
PACKAGE = "torch_overlay"
RELAUNCH = f"{PACKAGE}._inductor.relaunch"  # of which comments in C say `folder.module`
LOG = "inductor"  # upstream's log, and its group of counts, for those of the overlay
C = (".c", ".h")
C_STYLE = {"IndentWidth": 2, "ColumnLimit": 80}


@dataclass(frozen=True)
class PullRequest:
    name: str
    title: str
    message: str
    needs: tuple[str, ...]
    seams: tuple[str, ...]
    modules: tuple[str, ...]
    edits: str
    files: Mapping[str, str]  # path in upstream's tree -> text, of new files; not formatted yet
    tests: Mapping[str, str]  # the same, of tests
    names: Mapping[str, str] = field(default_factory=dict)  # module of the overlay -> what has its names there

    @property
    def commit_message(self) -> str:
        return self.message + (f"\n\nNeeds: {', '.join(self.needs)}" if self.needs else "")

    @property
    def edits_of(self) -> tuple[FileChange, ...]:
        """The changes of upstream's files."""
        return parse_patch(f"{self.name}/edits.patch", self.edits, ROOTS).changes

    def edited(self, read: Mapping[str, str]) -> dict[str, str]:
        """Return the new text of each file that it edits. `read` has the text of files that were edited before."""
        after = {}
        for change in self.edits_of:
            text = _text(change.path, read)
            after[change.path] = apply_change(_moved(change, text), text) or ""
        return after


def _moved(change: FileChange, text: str) -> FileChange:
    """Return the change with each hunk where its lines are in `text`: edits of what the pull request needs may have
    moved them. As git does, it takes the nearest place; a hunk whose lines are nowhere stays.
    """
    lines = text.split("\n")
    hunks, shift = [], 0
    for hunk in change.hunks:
        old, expected = hunk.side("-"), hunk.old_start - 1 + shift
        places = (i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old)
        place = min(places, key=lambda i: abs(i - expected), default=hunk.old_start - 1)
        shift = place - (hunk.old_start - 1)
        hunks.append(dataclasses.replace(hunk, old_start=place + 1))
    return dataclasses.replace(change, hunks=tuple(hunks))


def _text(path: str, edited: Mapping[str, str]) -> str:
    """Return the text of an upstream file: edited, or as installed."""
    return edited.get(path) or (installed_root() / path).read_text()


def folder() -> Path:
    return series_folder() / "upstream"


def read(path: Path) -> PullRequest:
    """Read a declaration. Raises SeriesError if something is missing or not allowed."""
    name = path.name
    try:
        found = tomllib.loads((path / DECLARATION).read_text())
        tests = {target: (path / source).read_text() for target, source in found["tests"].items()}
        edits = (path / EDITS).read_text() if (path / EDITS).is_file() else ""
        names = _names(path)
        made = PullRequest(
            name,
            found["title"],
            found["message"].strip(),
            tuple(found.get("needs", ())),
            tuple(found["seams"]),
            tuple(found["modules"]),
            edits,
            {target: _renamed(module, names) for target, module in found.get("files", {}).items()},
            tests,
            _own_names(found),
        )
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise SeriesError(f"{path}: no declaration of a pull request: {error!r}") from None
    problems = list(_problems(made))
    if problems:
        raise SeriesError(f"{path}: {'; '.join(problems)}")
    return made


def _own_names(found: Mapping[str, Any]) -> dict[str, str]:
    """Return upstream's names of the overlay's modules that a declaration adds."""
    files = {module: _dotted(target) for target, module in found.get("files", {}).items() if target.endswith(".py")}
    return files | {module: target for target, module in found.get("names", {}).items()}


def _names(path: Path) -> dict[str, str]:
    """Return upstream's names of the overlay's modules that a pull request and those that it needs add."""
    found = {p.parent.name: tomllib.loads(p.read_text()) for p in path.parent.glob(f"*/{DECLARATION}")}
    names: dict[str, str] = {}
    reached, todo = set(), [path.name]
    while todo:
        if (name := todo.pop()) in found and name not in reached:
            reached.add(name)
            todo += found[name].get("needs", ())
            names |= _own_names(found[name])
    return names


def _renamed(module: str, names: Mapping[str, str]) -> str:
    """Return the text of a module as a new file of upstream's."""
    text = source_of(module).read_text()
    package = RELAUNCH if module.endswith(C) else module.rpartition(".")[0].rpartition(".")[0]

    def mentioned(match: re.Match[str]) -> str:
        """A comment says `folder.module`; upstream's modules are in one folder."""
        other = f"{package}.{match[1]}"
        if not source_of(other).is_file():
            return match[0]
        return f"`{names[other].rpartition('.')[2]}" if other in names else f"`{other}"

    text = re.sub(r"`(\w+\.\w+)", mentioned, text)
    text = re.sub(rf'(?<=["=]){PACKAGE}\b(?!\.)', LOG, text)
    for other in sorted(names, key=len, reverse=True):  # a module before its package
        inside = r"(?!\.\w)" if source_of(other).name == "__init__.py" else ""  # a module of it may not be there
        text = re.sub(rf"\b{re.escape(other)}\b{inside}", names[other], text)
        ours, theirs = ("from {} import {}".format(*name.rsplit(".", 1)) for name in (other, names[other]))
        if (name := ours.rpartition(" ")[2]) != theirs.rpartition(" ")[2]:
            theirs += f" as {name}"
        text = re.sub(rf"\b{re.escape(ours)}\b", theirs, text)
    return text


def source_of(module: str) -> Path:
    """Return the file of a module of the overlay, or of a source of C, whose path is given."""
    if module.endswith(C):
        return ROOT / module
    stem = ROOT / module.replace(".", "/")
    return stem.with_suffix(".py") if not (stem / "__init__.py").is_file() else stem / "__init__.py"


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _formatted(path: str, text: str) -> str:
    """Return the text of a new file, formatted as upstream's, by no configuration of the current folder. Raises
    SeriesError if there is no ruff."""
    options = ["--isolated", "--target-version", PYTHON, "--line-length", str(CODE)]
    command = [sys.executable, "-m", "ruff", "format", "--quiet", *options, "-"]
    if path.endswith(C):
        rows = [
            row for row in (ROOT / ".clang-format").read_text().splitlines() if row.partition(":")[0] not in C_STYLE
        ]
        style = ", ".join([*rows, *(f"{name}: {value}" for name, value in C_STYLE.items())])
        run = "import clang_format; clang_format.clang_format()"
        command = [sys.executable, "-c", run, f"--style={{{style}}}"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise SeriesError(f"{path} can't be formatted: {done.stderr.strip()}; tools/setup lint installs what formats")
    return done.stdout


def _problems(made: PullRequest) -> Iterator[str]:
    from torch_overlay.seam_table import SEAMS

    known = {seam.target: seam.impl.partition(":")[0] for seam in SEAMS}
    if len(made.title) > TITLE:
        yield f"the title has more than {TITLE} characters"
    if long := [line for line in made.message.splitlines() if len(line) > LINE]:
        yield f"a line of the message has more than {LINE} characters: {long[0]!r}"
    if not made.tests:
        yield "it has no test"
    added = [line for line in made.edits.splitlines() if line.startswith("+")]
    if long := [line for line in added if len(line) > 1 + CODE]:
        yield f"a line of code has more than {CODE} characters: {long[0]!r}"
    for text in made.files.values():
        for module in sorted(set(re.findall(r"torch_overlay[\w.]*", text))):
            yield f"{module} is imported or named, but neither it nor what it needs adds that"
    for text in (made.edits, *made.tests.values(), *made.files.values()):
        if "overlay" in text:
            yield "its text mentions the overlay"
    for seam in made.seams:
        if seam not in known:
            yield f"{seam} is no seam"
        elif known[seam] not in made.modules:
            yield f"{known[seam]}, which {seam} calls, is not declared"
    if undeclared := set(made.modules) - {known.get(seam) for seam in made.seams}:
        yield f"no seam of its own calls {', '.join(sorted(undeclared))}"


def declared() -> list[PullRequest]:
    """Return the pull requests in an order in which each comes after what it needs. Raises SeriesError."""
    every = {p.name: read(p) for p in sorted(folder().iterdir()) if (p / DECLARATION).is_file()}
    ordered: dict[str, PullRequest] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path or name not in every:
            raise SeriesError(f"{folder()}: {' needs '.join((*path, name))}, which is not there, or in a circle")
        for other in every[name].needs:
            add(other, (*path, name))
        ordered.setdefault(name, every[name])

    for name in every:
        add(name, ())
    return list(ordered.values())


def patch_of(request: PullRequest, before: Mapping[str, str]) -> str:
    """Return the patch as `git am` reads it. `before` has the text of files that others edit before."""
    diffs = []
    for path, after in sorted(request.edited(before).items()):
        old = _text(path, before)
        lines = difflib.unified_diff(old.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
        diffs.append(f"diff --git a/{path} b/{path}\n{''.join(lines)}")
    files = {path: _formatted(path, text) for path, text in request.files.items()}
    diffs += [new_file_diff(path, text) for path, text in sorted({**files, **request.tests}.items())]
    text = f"{mail(request.title, request.commit_message)}{''.join(diffs)}--\n2.15.0\n"
    if (count := text.count("\n")) > MOST_LINES:
        raise SeriesError(f"{request.name}: {count} lines; a pull request has at most {MOST_LINES}")
    return text


def needed(request: PullRequest, every: Sequence[PullRequest]) -> list[PullRequest]:
    """Return what the request needs, and what that needs, in order."""
    by_name = {other.name: other for other in every}
    wanted: set[str] = set()
    todo = list(request.needs)
    while todo:
        name = todo.pop()
        wanted.add(name)
        todo += by_name[name].needs
    return [other for other in every if other.name in wanted]


def with_needs(request: PullRequest, every: Sequence[PullRequest]) -> dict[str, str]:
    """Return the text of the files that what the request needs edits and adds."""
    texts: dict[str, str] = {}
    for other in needed(request, every):
        texts |= {**other.edited(texts), **other.files}
    return texts


def export(every: Sequence[PullRequest]) -> dict[str, str]:
    """Return name of the file -> text, for the declared pull requests."""
    files = {f"{request.name}.patch": patch_of(request, with_needs(request, every)) for request in every}
    rows = [" ".join((request.name + ".patch", *request.needs)) + "\n" for request in every]
    return files | {"series": "# A patch, and what it needs.\n" + "".join(rows)}


def imports_of(module: str) -> list[str]:
    """Return the modules of the overlay that a module imports, inside of functions and for type checkers too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if source_of(name).is_file() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return sorted(name for name in found if name.partition(".")[0] == PACKAGE and name != PACKAGE)


def pulled_in(modules: Sequence[str], every: Sequence[PullRequest]) -> list[str]:
    """Return a table of the modules, and of all that they import. Raises SeriesError for a module that is not there."""
    given: list[str] = []
    for name in modules:
        path = source_of(name)
        if not path.is_file():
            raise SeriesError(f"{name}: there is no such module")
        inside = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
        given += sorted(_dotted(p.relative_to(ROOT).as_posix()) for p in inside if p.name != "__init__.py")
    names = {request.name: _names(folder() / request.name) for request in every}
    there = {module: name for name in reversed(names) for module in names[name]}
    reached, todo = dict.fromkeys(given), list(given)
    while todo:
        new = [name for name in imports_of(todo.pop()) if name not in reached]
        reached |= dict.fromkeys(new)
        todo += new
    lines = {module: source_of(module).read_text().count("\n") for module in reached}
    rows = []
    for module in reached:
        short = [name.removeprefix(f"{PACKAGE}.") for name in imports_of(module)]
        where = f" [{there[module]}]" if module in there else "" if module in given else " [besides]"
        rows.append(f"{lines[module]:5} {module.removeprefix(f'{PACKAGE}.')}{where}: {', '.join(short) or 'nothing'}")
    besides = [module for module in reached if module not in given and module not in there]
    sums = [f"{len(part)} modules with {sum(lines[m] for m in part)} lines" for part in (given, besides)]
    return [*rows, f"{sums[0]}; besides, not in the stack: {sums[1]}"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--imports", nargs="+", metavar="MODULE")
    options = parser.parse_args(argv)
    try:
        every = declared()
        if options.imports:
            print("\n".join(pulled_in(options.imports, every)))
            return 0
        wanted = export(every)
        if options.list:
            for request in every:
                size = wanted[f"{request.name}.patch"].count("\n")
                print(f"{request.name}: {request.title} ({size} lines; needs {', '.join(request.needs) or 'nothing'})")
            return 0
    except SeriesError as error:
        print(error, file=sys.stderr)
        return 1
    there = {p.name for p in folder().iterdir() if p.suffix == ".patch" or p.name == "series"}
    changed = [n for n, text in wanted.items() if n not in there or (folder() / n).read_text() != text]
    extra = sorted(there - wanted.keys())
    if options.check:
        for name in (*changed, *extra):
            print(f"{folder() / name} is not what tools/export_upstream.py writes", file=sys.stderr)
        print("up to date" if not changed and not extra else "run tools/export_upstream.py")
        return 1 if changed or extra else 0
    for name in changed:
        (folder() / name).write_text(wanted[name])
        print(f"wrote upstream/{name}")
    for name in extra:
        (folder() / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
