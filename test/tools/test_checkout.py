"""A git checkout: the series and the fixes become commits, and the series is taken away again."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torch.testing._internal.common_utils import TestCase

import form


if not form.PATCHED:
    import export_patches
    from series import base, installed_root, read_fixes, read_series


class Checkout:
    """A repository with the files of the installed tree that the series and the fixes change, at upstream's paths."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder)
        files = base()["files"]
        assert isinstance(files, dict)
        edited = {change.path for fix in read_fixes().values() for change in fix.changes if not change.is_new}
        for path in sorted({*files, *edited, "torch/version.py", "torch/__init__.py"}):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed_root() / path, self.root / path)
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-qm", "base")
        self.git("tag", "base")

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"{' '.join(arguments[:3])}: {done.stderr}")
        return done.stdout

    def apply(self, patch: Path) -> tuple[str, str]:
        """Make a commit of a patch, and return its title and its message."""
        self.git("am", "-q", "--keep-non-patch", str(patch))
        title, _, message = self.git("log", "-1", "--format=%B").partition("\n")
        return title, message.strip()


@form.overlay_only
class TestCheckout(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.checkout = Checkout(self.enterContext(tempfile.TemporaryDirectory()))

    def test_fixes(self) -> None:
        for fix in read_fixes().values():
            title, message = self.checkout.apply(fix.path)
            self.assertLessEqual(len(title), 72)
            self.assertIn("\n".join(["---", "", "diff --git "]), fix.path.read_text())
            self.assertTrue(message)

    def test_each_fix_with_those_that_it_needs_alone(self) -> None:
        fixes = read_fixes()
        for fix in fixes.values():
            for other in (*(fixes[name] for name in fix.needs), fix):
                self.checkout.apply(other.path)
            self.checkout.git("reset", "-q", "--hard", "base")

    def test_series(self) -> None:
        full = Path(self.enterContext(tempfile.TemporaryDirectory()))
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(export_patches.main(["--full", "--out", str(full)]), 0)
        patches = read_series(full)
        for patch in patches:
            title, message = self.checkout.apply(full / patch.name)
            self.assertIn(f"Subject: [PATCH] {title}\n", patch.header)
            self.assertIn(f"\n{message}\n---\n", patch.header)
            self.assertIn("Description: ", message)
        log = self.checkout.git("log", "--format=%s", "base..HEAD").splitlines()
        self.assertEqual(len(log), len(patches))
        tool = [sys.executable, str(form.ROOT / "tools" / "apply_patches.py")]
        done = subprocess.run([*tool, "--check", "--reverse", str(self.checkout.root)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        subprocess.run([*tool, "--reverse", str(self.checkout.root)], check=True, capture_output=True)
        self.assertEqual(self.checkout.git("status", "--porcelain", "--untracked-files=all").count("??"), 0)
        self.assertEqual(self.checkout.git("diff", "--stat", "base"), "")
        subprocess.run([*tool, str(self.checkout.root)], check=True, capture_output=True)
        self.assertEqual(self.checkout.git("diff", "--stat", "HEAD"), "")
