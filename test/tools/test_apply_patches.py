"""tools/apply_patches.py: applies to a pristine tree, refuses every other by name, and undoes itself byte for byte."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import form


sys.path.insert(0, str(form.ROOT / "tools"))

import apply_patches
import series
from series import installed_root


Tree = dict[str, tuple[bytes, int]]


def snapshot(root: Path) -> Tree:
    """Every file below a folder, with its permissions."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in root.rglob("*")
        if path.is_file()
    }


@form.overlay_only
class TestApplyPatches(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.series = series.read_series(series.series_folder())
        changes = [change for patch in self.series for change in patch.changes]
        self.edited = sorted({change.path for change in changes if not change.is_new})
        self.new = sorted({change.path for change in changes if change.is_new})
        for name in self.edited:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed_root() / name, self.root / name)
        self.pristine = snapshot(self.root)

    def run_tool(self, *arguments: object) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = apply_patches.main([*map(str, arguments)])
        return status, output.getvalue()

    def succeeds(self, *arguments: object) -> str:
        status, output = self.run_tool(*arguments)
        self.assertEqual(status, 0, output)
        return output

    def refused(self, *arguments: object) -> str:
        before = snapshot(self.root)
        status, output = self.run_tool(*arguments)
        self.assertEqual(status, 1, output)
        self.assertIn("Nothing was changed", output)
        self.assertEqual(before, snapshot(self.root))
        return output

    def edit(self, name: str, old: str = "import", new: str = "import ") -> None:
        path = self.root / name
        path.write_text(path.read_text().replace(old, new, 1))

    def test_apply_and_reverse_restore_every_byte(self) -> None:
        self.succeeds(self.root)
        applied = snapshot(self.root)
        self.assertEqual(sorted(applied), sorted([*self.edited, *self.new]))
        for name in self.edited:
            self.assertNotEqual(applied[name], self.pristine[name])
            self.assertEqual(applied[name][1], self.pristine[name][1])
        self.succeeds("--reverse", self.root)
        self.assertEqual(self.pristine, snapshot(self.root))
        self.assertFalse((self.root / "torch" / "_overlay").exists())

    def test_every_patch_of_the_series_applies_in_turn(self) -> None:
        contents = apply_patches.read(self.root, self.series)
        for patch in self.series:
            with self.subTest(patch.name):
                before, contents = contents, apply_patches.transform([patch], contents, reverse=False)
                self.assertEqual(before, apply_patches.transform([patch], contents, reverse=True))

    def test_git_applies_the_series_to_the_same_result(self) -> None:
        self.succeeds(self.root)
        ours = snapshot(self.root)
        self.succeeds("--reverse", self.root)
        for patch in self.series:
            command = ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", "--directory", str(self.root)]
            file = series.series_folder() / patch.name
            subprocess.run([*command, str(file)], check=True, cwd=self.root, capture_output=True)
        theirs = snapshot(self.root)
        self.assertEqual({name: text for name, (text, _) in ours.items()}, {n: text for n, (text, _) in theirs.items()})

    def test_what_is_applied_is_python(self) -> None:
        self.succeeds(self.root)
        for name in [*self.edited, *self.new]:
            if name.endswith(".py"):
                with self.subTest(name):
                    compile((self.root / name).read_text(), name, "exec")

    def test_check_changes_nothing(self) -> None:
        self.assertIn("would be applied", self.succeeds("--check", self.root))
        self.assertEqual(self.pristine, snapshot(self.root))
        self.succeeds(self.root)
        applied = snapshot(self.root)
        self.assertIn("would be reversed", self.succeeds("--check", "--reverse", self.root))
        self.assertEqual(applied, snapshot(self.root))

    def test_check_passes_on_the_installed_torch(self) -> None:
        self.succeeds("--check", installed_root())

    def test_the_torch_folder_itself_may_be_named(self) -> None:
        self.succeeds(self.root / "torch")
        self.succeeds("--reverse", self.root / "torch")
        self.assertEqual(self.pristine, snapshot(self.root))

    def test_list_names_every_patch_and_file(self) -> None:
        output = self.succeeds("--list")
        for name in [*(patch.name for patch in self.series), *self.edited, *self.new]:
            self.assertIn(name, output)

    def test_a_second_application_is_refused(self) -> None:
        self.succeeds(self.root)
        self.assertIn("applied already", self.refused(self.root))
        self.assertIn("applied already", self.refused("--check", self.root))

    def test_reversing_a_pristine_tree_is_refused(self) -> None:
        self.refused("--reverse", self.root)

    def test_a_dirty_file_is_named(self) -> None:
        for name in self.edited:
            with self.subTest(name):
                text = (self.root / name).read_text()
                self.edit(name)
                for option in ([], ["--check"]):
                    output = self.refused(*option, self.root)
                    self.assertIn(f"{name}: SHA-256", output)
                    self.assertEqual(output.count("SHA-256"), 1)
                (self.root / name).write_text(text)

    def test_a_missing_file_is_named(self) -> None:
        (self.root / self.edited[0]).unlink()
        self.assertIn(f"{self.edited[0]}: no such file", self.refused(self.root))

    def test_a_file_in_the_place_of_a_new_one_is_named(self) -> None:
        path = self.root / self.new[-1]
        path.parent.mkdir(parents=True)
        path.write_text("something of the user's\n")
        self.assertIn(f"{self.new[-1]}: exists already", self.refused(self.root))

    def test_reverse_refuses_what_was_edited_after_applying(self) -> None:
        self.succeeds(self.root)
        for name in (self.edited[0], self.new[0]):
            with self.subTest(name):
                text = (self.root / name).read_text()
                (self.root / name).write_text("# edited\n" + text)
                self.assertIn(name, self.refused("--reverse", self.root))
                (self.root / name).write_text(text)
        self.succeeds("--reverse", self.root)

    def test_a_folder_that_is_no_torch_tree(self) -> None:
        self.assertIn("neither", self.refused(self.root / "torch" / "_inductor"))

    def test_an_error_while_writing_puts_everything_back(self) -> None:
        replace = os.replace
        inodes = {name: (self.root / name).stat().st_ino for name in self.edited}
        for fail_at in (1, 2, 7):
            calls = 0

            def failing(*args: object) -> None:
                nonlocal calls
                calls += 1
                if calls == fail_at:  # noqa: B023
                    raise OSError("disk full")
                replace(*args)  # type: ignore[arg-type]

            with self.subTest(fail_at=fail_at), mock.patch.object(os, "replace", failing):
                self.assertIn("disk full", self.refused(self.root))
        self.assertEqual(inodes, {name: (self.root / name).stat().st_ino for name in self.edited})

    def test_an_error_while_staging_puts_everything_back(self) -> None:
        with mock.patch.object(Path, "write_bytes", side_effect=OSError("disk full")):
            self.assertIn("disk full", self.refused(self.root))
        self.assertFalse((self.root / "torch" / "_overlay").exists())

    def test_hard_links_to_the_old_files_keep_the_old_text(self) -> None:
        link = self.root / "linked.py"
        os.link(self.root / self.edited[0], link)
        text = link.read_bytes()
        self.succeeds(self.root)
        self.assertEqual(link.read_bytes(), text)

    def test_bytecode_in_new_folders_goes_with_them(self) -> None:
        self.succeeds(self.root)
        cache = (self.root / self.new[0]).parent / "__pycache__"
        cache.mkdir()
        (cache / "module.pyc").write_bytes(b"")
        self.succeeds("--reverse", self.root)
        self.assertEqual(self.pristine, snapshot(self.root))

    def test_it_runs_without_torch_and_without_the_package(self) -> None:
        script = form.ROOT / "tools" / "apply_patches.py"
        command = [sys.executable, "-S", "-E", str(script), "--check", str(self.root)]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)


class TestUnifiedDiff(unittest.TestCase):
    """The strict dialect: a hunk applies at its own line, to its own context, or not at all."""

    OLD = "".join(f"line {i}\n" for i in range(30))

    def change(self, inserted: dict[int, list[str]]) -> series.FileChange:
        (change,) = series.parse_patch("p", "Subject: x\n\n" + self.diff(inserted)).changes
        return change

    def diff(self, inserted: dict[int, list[str]]) -> str:
        return series.insertion_diff("torch/a.py", self.OLD, inserted)

    def test_insertions_anywhere(self) -> None:
        for positions in ([0], [1], [15], [29], [30], [0, 30], [3, 5, 12, 20], [3, 10], [3, 9]):
            inserted = {position: [f"new {position}", "second"] for position in positions}
            with self.subTest(positions=positions):
                lines = self.OLD.split("\n")
                for position in sorted(positions, reverse=True):
                    lines[position:position] = inserted[position]
                change = self.change(inserted)
                self.assertEqual(series.apply_change(change, self.OLD), "\n".join(lines))
                self.assertEqual(series.apply_change(change, "\n".join(lines), reverse=True), self.OLD)

    def test_no_offset_and_no_fuzz(self) -> None:
        change = self.change({15: ["new"]})
        for text in ("shifted\n" + self.OLD, self.OLD.replace("line 13\n", "line 13 \n"), self.OLD[:40]):
            with self.subTest(text[:8]), self.assertRaisesRegex(series.SeriesError, "torch/a.py"):
                series.apply_change(change, text)
        self.assertIsNotNone(series.apply_change(change, self.OLD.replace("line 5\n", "line five\n")))

    def test_new_files(self) -> None:
        for text in ("", "one\n", "one\n\n-two\n@@ three\n"):
            diff = series.new_file_diff("torch/b.py", text)
            (change,) = series.parse_patch("p", "Subject: x\n\n" + diff).changes
            with self.subTest(text):
                self.assertEqual(series.apply_change(change, None), text)
                self.assertIsNone(series.apply_change(change, text, reverse=True))
                with self.assertRaisesRegex(series.SeriesError, "exists already"):
                    series.apply_change(change, text)

    def test_a_file_without_a_last_line_break_is_refused(self) -> None:
        with self.assertRaises(series.SeriesError):
            series.new_file_diff("torch/b.py", "text")

    def test_a_truncated_or_foreign_patch_is_refused(self) -> None:
        whole = self.diff({15: ["new"]})
        for broken in (whole[: whole.index("+new")], whole.replace("torch/a.py", "../a.py")):
            with self.assertRaises(series.SeriesError):
                series.parse_patch("p", broken)


if __name__ == "__main__":
    unittest.main()
