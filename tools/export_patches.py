#!/usr/bin/env python
"""Writes the patch series from the seam table: patches/TAG/*.patch, their `series`, and the SHA-256 sums of both.

    python tools/export_patches.py                    write
    python tools/export_patches.py --check            compare with what is there, byte for byte; changes nothing
    python tools/export_patches.py --full --out DIR   write into DIR, the first patch with all new modules: for git am

The series is generated and never edited. A patch of seam_table.PATCHES has what its seams change in upstream's files:

    seam "wrap", "module"    one decorator line above each upstream definition
    seam "register"          one line at the end of the upstream module
    imports        one line per upstream file and hook function

tools/apply_patches.py copies the modules. Upstream text comes from the installed torch (or --torch ROOT), whose files
must be those of the base.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from fingerprint import module_file, without_collections  # also keeps the package's import from enabling the overlay
from series import (
    base,
    edit_diff,
    installed_root,
    mail,
    modules,
    new_file_diff,
    series_folder,
    SeriesError,
    sha256,
    SUMS,
    sums,
    travel,
)
from torch_overlay.seam_table import PATCHES, SEAMS
from torch_overlay.seams import find_definition, hook_line


if TYPE_CHECKING:
    from torch_overlay.seams import Patch, Seam

HOOKS_MODULE = "torch._overlay.hooks"


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
        self.add_import("registered_by", patch)
        if not self.has_tail:
            self.inserted[self.end] += [(patch, ""), (patch, "")]
            self.has_tail = True
        self.inserted[self.end].append((patch, f'registered_by("{impl}", __name__)'))

    def add_import(self, function: str, patch: int) -> None:
        if function not in self.imported:
            self.imported.add(function)
            line = f"from {HOOKS_MODULE} import {function}"
            self.inserted[import_position(self.tree)].append((patch, line))

    def text(self, patches: int) -> str:
        """The file with the lines of so many patches."""
        lines: list[str] = []
        for position, line in enumerate(self.source.split("\n")):
            lines += [added for owner, added in self.inserted.get(position, ()) if owner < patches]
            lines.append(line)
        return "\n".join(lines)

    def diff(self, patch: int) -> str:
        """What one patch changes, on top of those before it."""
        return edit_diff(self.name, self.text(patch), self.text(patch + 1))

    def patches(self) -> set[int]:
        return {owner for lines in self.inserted.values() for owner, _ in lines}


def header(patch: Patch, seams: list[Seam]) -> str:
    """Return a message for `git am`, with fields in the manner of Debian's DEP-3."""
    lines = textwrap.wrap(f"Description: {patch.description}", 98, subsequent_indent=" ")
    lines += [f"Origin: torch_overlay, patch {patch.slug}", f"Forwarded: {patch.upstream}", f"Base: {base()['tag']}"]
    for seam in seams:
        lines += [f"Seam: {seam.target} ({seam.kind})"]
        if seam.kind == "module":
            lines += textwrap.wrap(f" Functions: {', '.join(seam.methods)}", 98, subsequent_indent="  ")
        for field, text in (("Why", seam.why), ("Upstream", seam.upstream), ("Ends-When", seam.ends)):
            if text:
                lines += textwrap.wrap(f" {field}: {text}", 98, subsequent_indent="  ")
    return mail(patch.subject, "\n".join(lines))


@without_collections()
def export(root: Path, full: bool = False) -> dict[str, str]:
    """File name -> text, of the whole series. In full, the first patch creates the modules."""
    positions = {patch.slug: position for position, patch in enumerate(PATCHES)}
    upstream: dict[str, UpstreamFile] = {}
    for seam in sorted((s for s in SEAMS if s.patch is not None), key=lambda s: positions.get(str(s.patch), -1)):
        if seam.patch not in positions:
            raise SeriesError(f"{seam.target}: no patch is called {seam.patch!r}")
        name = module_file(root, seam.module).as_posix()
        if name not in upstream:
            upstream[name] = UpstreamFile(root, name)
        for hook in seam.hooks:
            upstream[name].add(hook, positions[seam.patch])
    result: dict[str, str] = {}
    for position, patch in enumerate(PATCHES):
        news = [new_file_diff(change) for change in modules().changes] if full and not position else []
        edits = [file.diff(position) for _, file in sorted(upstream.items()) if position in file.patches()]
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
    parser.add_argument("--full", action="store_true", help="with the new modules; needs --out")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--torch", type=Path, help="folder that contains the torch/ to read", metavar="ROOT")
    options = parser.parse_args(argv)
    if options.full and options.out is None:
        parser.error("--full needs --out DIR: the repository keeps the series without the modules")
    folder = options.out or series_folder()
    try:
        wanted = export(options.torch or installed_root(), options.full)
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
