"""What is built for users: a wheel and an sdist have all that the package needs, and work where they are installed."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import unittest
import zipfile
from pathlib import Path

from torch._dynamo.test_case import TestCase

import form


BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(tree: Path, hook: str, target: Path) -> Path:
    command = [sys.executable, "-c", BUILD, hook, str(target)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    return target / done.stdout.splitlines()[-1]


def package_files(root: Path) -> set[str]:
    """Paths in the package of all that git would keep."""
    found = (path for path in (root / "torch_overlay").rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}


@unittest.skipIf(form.PATCHED, "the package is the overlay form's")
class TestPackage(TestCase):
    def test_wheel_of_an_sdist_is_whole_and_works(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        with tarfile.open(self.copied(folder)) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (tree,) = (folder / "unpacked").iterdir()
        wheel = build(tree, "build_wheel", folder)
        installed = folder / "installed"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(installed)
        self.assertEqual(package_files(installed), package_files(form.ROOT))
        self.run_installed(
            installed,
            """
            import torch_overlay
            from torch_overlay import csrc
            from torch_overlay._inductor.relaunch.launch import executable
            from stand_ins import relaunch_driver

            assert torch_overlay.__file__.startswith(sys.argv[1]), torch_overlay.__file__
            module = relaunch_driver.module()
            space = module.reserve(0, 1 << 20)
            address = module.take(space, 4096)
            assert module.allocations(space) == b"".join(n.to_bytes(8, "little") for n in (address, 4096))
            module.release(space)
            assert relaunch_driver.driver().left() == (0, 0, 0)
            """,
        )

    def test_changelog_begins_with_this_version_and_the_release_that_it_was_tested_on(self) -> None:
        base = json.loads((form.ROOT / "torch_overlay" / "base.json").read_text())
        changelog = (form.ROOT / "CHANGELOG.md").read_text()
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in changelog.splitlines() if line[:1] == "|"
        ]
        self.assertEqual(
            [rows[2][0], rows[2][1], rows[2][4]], [form.overlay.__version__, base["torch"], base["triton"]]
        )
        self.assertEqual(re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)[0], form.overlay.__version__)

    def copied(self, folder: Path) -> Path:
        """An sdist of what git has or would take, so that no build of somebody's lies in it."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=form.ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
        for name in filter(None, names):
            if (source := form.ROOT / name).is_file() and name.partition("/")[0] not in ("patches", "test"):
                (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "copy" / name).write_bytes(source.read_bytes())
        return build(folder / "copy", "build_sdist", folder)

    def run_installed(self, installed: Path, text: str) -> None:
        paths = [str(installed), str(form.ROOT / "test"), str(form.ROOT / "test" / "inductor")]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "TORCH_OVERLAY_DISABLE": ""}
        done = form.fork_python("import sys\n" + textwrap.dedent(text), str(installed), env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
