#!/usr/bin/env python
"""Writes the patch series from the overlay: patches/TAG/*.patch, their `series`, and the SHA-256 sums of both.

    python tools/export_patches.py             write
    python tools/export_patches.py --check     compare with what is there, byte for byte; changes nothing

The series is generated and never edited. For each patch of seam_table.PATCHES it says:

    new modules    every module of the package, but for the engine, becomes one in torch/_overlay/, its text unchanged
                   but for the import prefix. It comes with the first patch whose seams reach it by imports, and with
                   the last patch if no seam does.
    seam "wrap"    one decorator line above the upstream definition
    seam "replace", "register"    one line at the end of the upstream module
    imports        one line per upstream file and hook function

Upstream text comes from the installed torch (or --torch ROOT), whose files must be those of the base.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from fingerprint import module_file  # also keeps the package's import from enabling the overlay
from series import (
    base,
    insertion_diff,
    installed_root,
    mail,
    new_file_diff,
    ROOT,
    series_folder,
    SeriesError,
    sha256,
    SUMS,
    sums,
)
from torch_overlay.seam_table import PATCHES, SEAMS
from torch_overlay.seams import find_definition, hook_line


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay.seams import Patch, Seam

PACKAGE = ROOT / "torch_overlay"
# What only the overlay form has: the engine and the demonstration, which compares it with stock. torch/_overlay gets an
# __init__.py of its own.
ENGINE = ("__init__.py", "__main__.py", "seams.py", "seam_table.py", "errors.py", "base.json", "_engine")
ENGINE += ("_cli/demo.py", "_cli/demo_gpu.py", "_cli/terminal.py")
PATCHED_INIT = PACKAGE / "_engine" / "patched_init.py"
# A string that names a module of ours: "module:name", or an import statement in text that becomes code.
REFERENCE = re.compile(r"^(torch_overlay(?:\.\w+)+):\w|\b(?:from|import)\s+(torch_overlay(?:\.\w+)+)")
HOOKS_MODULE = "torch._overlay.hooks"


def travel(text: str) -> str:
    """The text of one of our modules with the import prefix of the patched form."""
    text = re.sub(r"\btorch_overlay(?=\.\w)", "torch._overlay", text)
    return re.sub(r"\bfrom torch_overlay import\b", "from torch._overlay import", text)


def travelling_files() -> dict[str, str]:
    """Path under torch_overlay/ -> text, of everything that becomes part of torch/_overlay/."""
    found = {"__init__.py": PATCHED_INIT.read_bytes().decode()}
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and not {name, name.partition("/")[0]} & {*ENGINE}:
            found[name] = path.read_bytes().decode()
    return found


def module_of(name: str) -> str:
    """Name of the module in a file under torch_overlay/."""
    parts = ["torch_overlay", *Path(name).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def references(name: str, text: str) -> set[str]:
    """Names of modules of ours that a module may need, those that are imported inside of functions included."""
    found: set[str] = set()
    tree = ast.parse(text)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch_overlay":
                    raise SeriesError(f"torch_overlay/{name}:{node.lineno}: import a module of it, not the package")
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module_of(name).split(".")
                package = package if name.endswith("__init__.py") else package[:-1]
                source = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            found.add(source)
            found.update(f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            found.update(match[1] or match[2] for match in REFERENCE.finditer(node.value))
    return found


def reach(roots: Iterable[str], files: dict[str, str]) -> set[str]:
    """The files that a set of modules needs: what they import, the packages around it, the data files they name, or
    look for by a pattern."""
    by_module = {module_of(name): name for name in files if name.endswith(".py")}
    found: set[str] = set()
    todo = list(roots)
    while todo:
        module = todo.pop()
        todo += [module.rpartition(".")[0]] if "." in module else []
        name = by_module.get(module)
        if name is None or name in found:
            continue
        found.add(name)
        todo += references(name, files[name])
        data = [other for other in files if not other.endswith(".py") and Path(other).parent == Path(name).parent]
        patterns = re.findall(r"\bglob\(\"([^\"]+)\"\)", files[name])
        named = [other for other in data if Path(other).name in files[name]]
        found.update(named, *(fnmatch.filter(data, f"*/{pattern}") for pattern in patterns))
    return found


def assign_files(files: dict[str, str]) -> dict[str, list[str]]:
    """Slug of a patch -> the new files that it brings."""
    left = set(files)
    assigned: dict[str, list[str]] = {}
    for position, patch in enumerate(PATCHES):
        roots = [seam.impl.partition(":")[0] for seam in SEAMS if seam.patch == patch.slug]
        if position == 0:
            roots += ["torch_overlay.hooks", "torch_overlay.config", "torch_overlay.version"]
        taken = left & reach(roots, files) if patch is not PATCHES[-1] else left
        assigned[patch.slug] = sorted(taken)
        left = left - taken
    return assigned


def import_position(tree: ast.Module) -> int:
    """Line, from 0, at which an import of our hooks goes: in order among upstream's `from torch... import`."""
    block = []
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            block.append(node)
        elif not is_docstring:
            break
    block = [node for node in block if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    absolute = [n for n in block if isinstance(n, ast.ImportFrom) and not n.level and str(n.module).startswith("torch")]
    for node in absolute:
        if str(node.module) > HOOKS_MODULE:
            return node.lineno - 1
    if absolute:
        return absolute[-1].end_lineno or 0
    if not block:
        raise SeriesError("no import statement to put ours beside")
    straight = [node for node in block if isinstance(node, ast.Import) or not node.level]
    return (straight[-1].end_lineno or 0) if straight else block[0].lineno - 1


class UpstreamFile:
    """One upstream file, and the lines that each patch inserts into it."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.source = (root / name).read_bytes().decode()
        expected = base()["files"]
        assert isinstance(expected, dict)
        if sha256(self.source) != expected.get(name):
            raise SeriesError(f"{root / name} is not that of PyTorch {base()['tag']}; see tools/fingerprint.py --write")
        self.tree = ast.parse(self.source)
        self.end = len(self.source.split("\n")) - 1
        # line, from 0, in the untouched file -> [(position of the patch in the series, line of text)]
        self.inserted: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.imported: set[str] = set()
        self.has_tail = False

    def add(self, seam: Seam, patch: int) -> None:
        impl = travel(seam.impl)
        if seam.kind == "wrap":
            self.add_import("wrapped_by", patch)
            node = find_definition(self.tree, seam.qualname)
            line = hook_line(node) - 1
            self.inserted[line].append((patch, f'{" " * node.col_offset}@wrapped_by("{impl}")'))
            return
        function = "replaced_by" if seam.kind == "replace" else "registered_by"
        self.add_import(function, patch)
        if not self.has_tail:
            self.inserted[self.end] += [(patch, ""), (patch, "")]
            self.has_tail = True
        if seam.kind == "replace":
            line = f'{seam.qualname} = replaced_by("{impl}")({seam.qualname})'
        else:
            line = f'registered_by("{impl}", __name__)'
        self.inserted[self.end].append((patch, line))

    def add_import(self, function: str, patch: int) -> None:
        if function not in self.imported:
            self.imported.add(function)
            line = f"from {HOOKS_MODULE} import {function}"
            self.inserted[import_position(self.tree)].append((patch, line))

    def diff(self, patch: int) -> str:
        """What one patch changes, on top of those before it."""
        lines = self.source.split("\n")
        before: list[str] = []
        new: dict[int, list[str]] = defaultdict(list)
        for position in range(len(lines)):
            for owner, line in self.inserted.get(position, ()):
                if owner < patch:
                    before.append(line)
                elif owner == patch:
                    new[len(before)].append(line)
            before.append(lines[position])
        return insertion_diff(self.name, "\n".join(before), new)

    def patches(self) -> set[int]:
        return {owner for lines in self.inserted.values() for owner, _ in lines}


def header(patch: Patch, seams: list[Seam]) -> str:
    """Return a message for `git am`, with fields in the manner of Debian's DEP-3."""
    lines = textwrap.wrap(f"Description: {patch.description}", 98, subsequent_indent=" ")
    lines += [f"Origin: torch_overlay, patch {patch.slug}", f"Forwarded: {patch.upstream}", f"Base: {base()['tag']}"]
    for seam in seams:
        lines += [f"Seam: {seam.target} ({seam.kind})"]
        for field, text in (("Why", seam.why), ("Upstream", seam.upstream), ("Ends-When", seam.ends)):
            if text:
                lines += textwrap.wrap(f" {field}: {text}", 98, subsequent_indent="  ")
    return mail(patch.subject, "\n".join(lines))


def export(root: Path) -> dict[str, str]:
    """File name -> text, of the whole series."""
    slugs = [patch.slug for patch in PATCHES]
    upstream: dict[str, UpstreamFile] = {}
    for seam in SEAMS:
        if seam.patch is None:
            continue
        if seam.patch not in slugs:
            raise SeriesError(f"{seam.target}: no patch is called {seam.patch!r}")
    for position, slug in enumerate(slugs):
        for seam in SEAMS:
            if seam.patch == slug:
                name = module_file(root, seam.module).as_posix()
                upstream.setdefault(name, UpstreamFile(root, name) if name not in upstream else upstream[name])
                upstream[name].add(seam, position)
    files = travelling_files()
    assigned = assign_files(files)
    result: dict[str, str] = {}
    for position, patch in enumerate(PATCHES):
        edits = [file.diff(position) for _, file in sorted(upstream.items()) if position in file.patches()]
        news = [new_file_diff(f"torch/_overlay/{name}", travel(files[name])) for name in assigned[patch.slug]]
        if edits or news:
            text = header(patch, [seam for seam in SEAMS if seam.patch == patch.slug])
            result[f"{patch.slug}.patch"] = text + "".join(edits + news)
    result["series"] = "".join(f"{name}\n" for name in result)
    return {**result, SUMS: sums(result)}


def differences(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Names of the files in which a folder differs from the series."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.is_dir() else {}
    there = {name: text.encode() for name, text in wanted.items()}
    return sorted(name for name in {*found, *there} if found.get(name) != there.get(name))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--torch", type=Path, help="folder that contains the torch/ to read", metavar="ROOT")
    options = parser.parse_args(argv)
    folder = series_folder()
    try:
        wanted = export(options.torch or installed_root())
    except SeriesError as error:
        print(error, file=sys.stderr)
        return 1
    changed = differences(folder, wanted)
    if options.check:
        print("\n".join(f"{folder.name}/{name}: not what the overlay exports" for name in changed) or "up to date")
        return 1 if changed else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        if name in wanted:
            (folder / name).write_bytes(wanted[name].encode())
        else:
            (folder / name).unlink()
        print(f"{'wrote' if name in wanted else 'removed'} {folder.name}/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
