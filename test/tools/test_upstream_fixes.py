"""Fixes for upstream: each applies to the base, its tests pass with it, and fail without it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, TestCase

import form


if not form.PATCHED:
    import run_patched
    from series import fixed, installed_root, read_fixes

FIXES = {} if form.PATCHED else read_fixes()
QUICK = "wrapped-numbers"  # compiles nothing
NAMES = [QUICK, *(name for name in FIXES if name != QUICK)]
OLDER = {"cached-properties": (3, 12)}  # of an interpreter older than that; a newer one doesn't have the fault
SENDER = "Author and use of AI tools: to be filled in by the person who sends this."


@form.overlay_only
class TestFixes(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.copy = Path(tempfile.mkdtemp(prefix="fixed_torch_"))
        cls.addClassCleanup(shutil.rmtree, cls.copy, ignore_errors=True)
        run_patched.make_copy(installed_root(), cls.copy)

    def run_tests(self, tests: Mapping[str, str]) -> tuple[int, str]:
        """Run test files, each as upstream does. Return the first status that is not 0, and the output."""
        env = run_patched.environment(self.copy) | {"TORCH_OVERLAY_DISABLE": "1", "PYTHONPATH": str(self.copy)}
        env.pop("CI", None)  # there upstream's run_tests writes reports, with packages that are not required
        said = ""
        with tempfile.TemporaryDirectory() as folder:
            for path, text in tests.items():
                name = Path(path).name
                Path(folder, name).write_text(text)
                command = [sys.executable, name]
                done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600)
                said += done.stderr + done.stdout
                if done.returncode:
                    return done.returncode, said
        return 0, said

    def replace(self, texts: Mapping[str, str]) -> None:
        """Put files into the copy, whose other files are links to those of the installed tree."""
        for path in [path for path in texts if path.startswith("torch/")]:
            target = self.copy / path
            target.unlink(missing_ok=True)
            target.write_text(texts[path])
            self.addCleanup(self.restore, path)

    def restore(self, path: str) -> None:
        target, installed = self.copy / path, installed_root() / path
        target.unlink(missing_ok=True)
        if installed.is_file():
            run_patched.link(str(installed), str(target))

    def tearDown(self):
        self.doCleanups()
        self.assertEqual(run_patched.differences(installed_root(), self.copy), [])
        super().tearDown()

    @parametrize("name", form.sampled(NAMES, len(NAMES)))
    def test_fails_without_it_and_passes_with_it(self, name):
        fix = FIXES[name]
        needed = [FIXES[other] for other in fix.needs]
        self.assertTrue(fix.tests)
        self.replace(fixed(needed, installed_root()))
        if sys.version_info < OLDER.get(name, sys.version_info + (0,)):
            status, said = self.run_tests(fix.tests)
            self.assertRegex(said, r"FAILED \((failures|errors)=", "its tests pass without it")
            self.assertNotEqual(status, 0)
        self.replace(fixed([*needed, fix], installed_root()))
        status, said = self.run_tests(fix.tests)
        self.assertEqual(status, 0, said)

    def test_all_fit_one_tree(self):
        """Those of one file that don't need each other, too."""
        for path, text in fixed([*FIXES.values()], installed_root()).items():
            compile(text, path, "exec")

    def test_each_leaves_its_issue_and_sender_to_a_person(self):
        self.assertLessEqual(len(FIXES), 22)
        for fix in FIXES.values():
            message = fix.path.read_text().partition("\n---\n")[0]
            self.assertRegex(message, r"\n(Fixes #|Concerns #\d)")
            self.assertEqual(message.splitlines()[-1], SENDER)
            needed = re.findall(r"(?m)^Needs: (.*)", message)
            self.assertEqual(needed, [", ".join(fix.needs)] if fix.needs else [])

    def test_texts_speak_of_upstream_alone(self):
        for fix in FIXES.values():
            head, *diffs = fix.path.read_text().split("diff --git ")
            added = [line for diff in diffs for line in diff.splitlines() if line.startswith("+")]
            self.assertNotIn("overlay", head.partition("Subject:")[2] + "".join(added))


if not form.PATCHED:
    instantiate_parametrized_tests(TestFixes)
