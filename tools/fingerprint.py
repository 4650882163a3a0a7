#!/usr/bin/env python
"""Fingerprints of upstream definitions, for whoever adds a seam or moves the project to another base.

    python tools/fingerprint.py torch._inductor.scheduler:Scheduler.can_fuse    print one; of a constructor and methods
                                that are overridden: torch._inductor.scheduler:Scheduler.__init__,can_fuse,_codegen;
                                of functions of a module: torch._inductor.scheduler:,used_by,pick_loop_order
    python tools/fingerprint.py --write      rewrite torch_overlay/base.json from the installed torch and the seam table
    python tools/fingerprint.py --check      compare the table and base.json with the installed torch

Reads the text of the installed torch and never imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from series import BASE, installed_root, ROOT


sys.path.insert(0, str(ROOT))
with mock.patch.dict(os.environ, TORCH_OVERLAY_DISABLE="1"):
    from torch_overlay.seams import DefinitionNotFound, fingerprint


if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python's garbage collector is off inside: it goes through all nodes of large syntax trees, again and again, which
    takes twice as long as parsing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def module_file(root: Path, module: str) -> Path:
    """The source file of an upstream module, relative to `root`."""
    path = Path(*module.split("."))
    return path / "__init__.py" if (root / path / "__init__.py").exists() else path.with_suffix(".py")


def print_fingerprint(root: Path, target: str) -> None:
    module, _, names = target.partition(":")
    qualname, *methods = names.split(",")
    owner = qualname.rpartition(".")[0]
    source = (root / module_file(root, module)).read_bytes().decode()
    listed = [qualname, *(f"{owner}.{name}" for name in methods)] if qualname else methods
    print(fingerprint(source, *listed), target)


def recorded() -> dict[str, object]:
    """What base.json says; nothing if it is missing or broken, so that it can be written anew."""
    try:
        record = json.loads(BASE.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def base_record(root: Path) -> dict[str, object]:
    """What base.json should say for the torch tree at `root`."""
    from torch_overlay.seam_table import SEAMS

    old = recorded()
    version: dict[str, str] = {}
    exec((root / "torch" / "version.py").read_bytes(), version)
    files = sorted({module_file(root, seam.module).as_posix() for seam in SEAMS})
    return {
        "torch": version["__version__"].partition("+")[0],
        "tag": "v" + version["__version__"].partition("+")[0],
        "git": version["git_version"],
        "triton": old.get("triton", ""),
        "files": {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in files},
    }


@without_collections()
def differences(root: Path) -> list[str]:
    from torch_overlay.seam_table import SEAMS

    found = []
    if recorded() != base_record(root):
        found.append("base.json: does not describe the installed torch and the seam table; run with --write")
    for seam in SEAMS:
        if not seam.fingerprint:
            continue
        try:
            actual = fingerprint((root / module_file(root, seam.module)).read_bytes().decode(), *seam.definitions)
        except (DefinitionNotFound, FileNotFoundError):
            actual = "no such definition"
        if actual != seam.fingerprint:
            found.append(f"{seam.target}: the table says {seam.fingerprint}, the source is {actual}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="MODULE:NAME")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    root = installed_root()
    for target in options.targets:
        print_fingerprint(root, target)
    if options.write:
        BASE.write_bytes((json.dumps(base_record(root), indent=2) + "\n").encode())
        print(f"wrote {BASE}")
    if options.check:
        found = differences(root)
        print("\n".join(found) or "the seam table and base.json match the installed torch")
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
