"""The landing stack as a whole, on one tree: all its tests pass, and it compiles programs as the overlay does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from torch.testing._internal.common_utils import TestCase

import form


if not form.PATCHED:
    import export_upstream
    import generated_text
    import run_patched
    import run_stack

# Of each part that has a say in the code: copies, folding, backwards, graph breaks, partitions, views, random numbers,
# reuse and donation of buffers, ranges, threads.
PROGRAMS = (
    "prefetch_loop.*",
    "copy_to_rows_of_host_input.*",
    "dropouts_on_side_stream.*",
    "two_frames_in_one_step.default",
    "batch_norm_on_side_stream.*",
    "copied_memory_returned.*",
    "train_dropout.*",
    "current_and_default_stream.reduce-overhead",
    "train_several_forwards.reduce-overhead",
    "train_ranges_kept.default",
    "train_two_threads.default",
    "drawn_31_[0-5].*",
)


@form.overlay_only
class TestWholeStack(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.copy = Path(tempfile.mkdtemp(prefix="stacked_torch_"))
        cls.addClassCleanup(shutil.rmtree, cls.copy, ignore_errors=True)
        run_stack.make_copy(cls.copy)

    def run_there(self, *command: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
        env = run_patched.environment(self.copy) | {"TORCH_OVERLAY_DISABLE": "1"}
        env.pop("CI", None)  # there upstream's run_tests writes reports, with packages that are not required
        return subprocess.run([sys.executable, *command], env=env, cwd=folder, capture_output=True, text=True)

    def succeed(self, *command: str, folder: str | None = None) -> None:
        done = self.run_there(*command, folder=folder)
        self.assertEqual(done.returncode, 0, done.stdout[-5000:] + done.stderr[-20000:])

    def test_its_tests_pass(self):
        """Those of each pull request, with all that come after it: in one process, which is faster, or where they mind
        what other tests leave behind, each file by itself, as upstream runs them."""
        tests = {path: text for request in export_upstream.declared() for path, text in request.tests.items()}
        with tempfile.TemporaryDirectory() as folder:
            for path, text in tests.items():
                Path(folder, Path(path).name).write_text(text)
            done = self.run_there("-m", "unittest", *(Path(path).name for path in tests), folder=folder)
            defined = sum(text.count("    def test_") for text in tests.values())
            ran = re.search(r"^Ran (\d+) tests", done.stderr, flags=re.MULTILINE)
            self.assertIsNotNone(ran, done.stderr[-20000:])
            self.assertGreaterEqual(int(ran[1]), defined)  # some have parameters
            failed = re.findall(r"^(?:FAIL|ERROR): \w+ \((\w+)\.", done.stderr, flags=re.MULTILINE)
            self.assertEqual(bool(failed), done.returncode != 0, done.stderr[-20000:])
            for name in sorted({*failed}):
                self.succeed(f"{name}.py", folder=folder)

    def test_modules_can_be_imported_first(self):
        for module in ("torch._functorch._streams.fx", "torch._inductor.cudagraph_relaunch.call_keys"):
            self.succeed("-c", f"import {module}")

    def test_generated_code(self):
        """The code of programs, and their plans. `tools/generated_text.py` does this for all programs."""
        with tempfile.TemporaryDirectory() as folder:
            sides = [Path(folder, name) for name in ("overlay", "stack")]
            for side in sides:
                command = [str(form.ROOT / "tools" / "generated_text.py"), "--out", str(side), "--jobs", "1"]
                command += ["--drawn", "6", "--programs", *PROGRAMS]
                if side.name == "stack":
                    self.succeed(*command)
                else:
                    subprocess.run([sys.executable, *command], check=True, capture_output=True)
            self.assertEqual(generated_text.compare(*sides), 0)
            self.assertGreater(len(list(sides[0].iterdir())), len(PROGRAMS))


if __name__ == "__main__":
    unittest.main()
