"""tools/apply_patches.py: applies to a pristine tree, refuses every other by name, and undoes itself byte for byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import patch_faults
from patch_faults import snapshot

import apply_patches
import form
import run_patched
import series
from printed import printed
from series import installed_root


TOOL = """
import series, sys, pathlib
series.BASE, series.ROOT = map(pathlib.Path, sys.argv[1:3])
import apply_patches
sys.exit(apply_patches.main(sys.argv[3:]))
"""

SOMEBODY = 65534  # a user who isn't root: the owner of no file

WAITS = """
import sys
sys.path.insert(0, sys.argv[1])
import pathlib, apply_patches
with apply_patches.locked(pathlib.Path(sys.argv[2])):
    pass
"""


class SmallTree(unittest.TestCase):
    """A tree and a series of a few lines: `patch_faults.make_small`."""

    def setUp(self) -> None:
        self.enterContext(mock.patch.multiple(series, BASE=series.BASE, ROOT=series.ROOT))
        self.root = self.small()
        self.pristine = snapshot(self.root)

    def small(self) -> Path:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        patch_faults.make_small(folder)
        return folder / "tree"

    def succeeds(self, *arguments: object) -> str:
        *options, root = arguments
        result = patch_faults.run(Path(str(root)), *map(str, options))
        self.assertEqual(result.status, 0, result.output)
        return result.output

    def refused(self, *arguments: object) -> str:
        *options, root = arguments
        before = snapshot(self.root)
        result = patch_faults.run(Path(str(root)), *map(str, options))
        self.assertEqual(result.status, 1, result.output)
        self.assertNotIn("Traceback", result.output)
        self.assertIn("Nothing was changed", result.output)
        self.assertEqual(before, snapshot(self.root))
        return result.output


@form.overlay_only
class TestWholeSeries(unittest.TestCase):
    """On the files of the installed torch that the series changes."""

    def run_tool(self, *arguments: object) -> str:
        status, out, errors = printed(apply_patches.main, [*map(str, arguments)])
        self.assertEqual((status, errors), (0, ""))
        return out

    def test_apply_and_reverse_restore_every_byte(self) -> None:
        changes = [change for patch in series.whole_series() for change in patch.changes]
        edited = sorted({change.path for change in changes if not change.is_new})
        root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name in edited:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed_root() / name, root / name)
        pristine = snapshot(root)
        self.run_tool(root)
        applied = {name: entry for name, entry in snapshot(root).items() if entry is not None}
        self.assertEqual(applied.keys(), {change.path for change in changes})
        for name in edited:
            self.assertNotEqual(applied[name], pristine[name])
            self.assertEqual(applied[name][1], pristine[name][1])
        self.run_tool("--reverse", root)
        self.assertEqual(pristine, snapshot(root))

    def test_check_passes_on_the_installed_torch(self) -> None:
        self.run_tool("--check", installed_root())

    def test_list_names_every_patch_and_file(self) -> None:
        output = self.run_tool("--list")
        for patch in series.whole_series():
            for name in (patch.name, *(change.path for change in patch.changes)):
                self.assertIn(name, output)


@form.overlay_only
class TestApplyPatches(SmallTree):
    EDITED = ("torch/a.py", "torch/sub/b.py", "torch/sub/linked.py")
    NEW = "torch/_overlay/deep/c.py"

    def test_check_changes_nothing(self) -> None:
        self.assertIn("would be applied", self.succeeds("--check", self.root))
        self.assertEqual(self.pristine, snapshot(self.root))
        self.succeeds(self.root)
        applied = snapshot(self.root)
        self.assertIn("would be reversed", self.succeeds("--check", "--reverse", self.root))
        self.assertEqual(applied, snapshot(self.root))

    def test_the_torch_folder_itself_may_be_named(self) -> None:
        self.succeeds(self.root / "torch")
        self.succeeds("--reverse", self.root / "torch")
        self.assertEqual(self.pristine, snapshot(self.root))

    def test_a_second_application_is_refused(self) -> None:
        self.succeeds(self.root)
        self.assertIn("applied already", self.refused(self.root))
        self.assertIn("applied already", self.refused("--check", self.root))

    def test_reversing_a_pristine_tree_is_refused(self) -> None:
        self.refused("--reverse", self.root)

    def test_a_dirty_file_is_named(self) -> None:
        for name in self.EDITED:
            with self.subTest(name):
                text = (self.root / name).read_text()
                (self.root / name).write_text(text + "# edited\n")
                for option in ([], ["--check"]):
                    output = self.refused(*option, self.root)
                    self.assertIn(f"{name}: SHA-256", output)
                    self.assertEqual(output.count("SHA-256"), 1)
                (self.root / name).write_text(text)

    def test_a_missing_file_is_named(self) -> None:
        (self.root / self.EDITED[0]).unlink()
        self.assertIn(f"{self.EDITED[0]}: no such file", self.refused(self.root))

    def test_a_file_in_the_place_of_a_new_one_is_named(self) -> None:
        path = self.root / self.NEW
        path.parent.mkdir(parents=True)
        path.write_text("something of the user's\n")
        self.assertIn(f"{self.NEW}: exists already", self.refused(self.root))

    def test_reverse_refuses_what_was_edited_after_applying(self) -> None:
        self.succeeds(self.root)
        for name in (self.EDITED[0], self.NEW):
            with self.subTest(name):
                text = (self.root / name).read_text()
                (self.root / name).write_text("# edited\n" + text)
                self.assertIn(name, self.refused("--reverse", self.root))
                (self.root / name).write_text(text)
        self.succeeds("--reverse", self.root)

    def test_a_folder_that_is_no_torch_tree(self) -> None:
        self.assertIn("neither", self.refused(self.root / "torch" / "sub"))

    def test_without_hard_links_originals_are_copied(self) -> None:
        replace, calls = os.replace, 0

        def failing(*args: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError("disk full")
            replace(*args)  # type: ignore[arg-type]

        with mock.patch.object(os, "link", side_effect=PermissionError("no links")):
            self.succeeds(self.root)
            with mock.patch.object(os, "replace", failing):
                self.assertIn("disk full", self.refused("--reverse", self.root))
        self.succeeds("--reverse", self.root)
        self.assertEqual(self.pristine, snapshot(self.root))

    def test_a_link_that_leads_out_of_the_tree_is_refused(self) -> None:
        """What it leads to may be another tree's, too."""
        with tempfile.TemporaryDirectory() as name:
            for path in (self.root / self.EDITED[0], (self.root / self.EDITED[-1]).parent):
                with self.subTest(str(path)):
                    path.rename(Path(name, "moved"))
                    path.symlink_to(Path(name, "moved"))
                    before = snapshot(Path(name))
                    output = self.refused(self.root)
                    self.assertIn(f"{path.relative_to(self.root)}: a symbolic link to {name}/moved", output)
                    self.assertTrue(path.is_symlink())
                    self.assertEqual(before, snapshot(Path(name)))
                    path.unlink()
                    Path(name, "moved").rename(path)

    def test_a_copy_of_symbolic_links_has_copies_of_what_will_change(self) -> None:
        """Across file systems a copy is made of symbolic links, which lead to the installed tree."""
        (self.root / "torch" / "other.py").write_text("x = 1\n")
        installed = snapshot(self.root)
        with tempfile.TemporaryDirectory() as name:
            with mock.patch.object(os, "link", side_effect=OSError("another file system")):
                run_patched.make_copy(self.root, Path(name, "copy"))
            self.assertTrue(Path(name, "copy", "torch", "other.py").is_symlink())
            self.succeeds(Path(name, "copy"))
            self.succeeds("--reverse", Path(name, "copy"))
            self.assertEqual(run_patched.differences(self.root, Path(name, "copy")), [])
        self.assertEqual(installed, snapshot(self.root))

    def test_new_files_do_not_go_where_a_link_leads(self) -> None:
        for target in ("torch/sub", "no such folder"):
            link = self.root / "torch" / "_overlay"
            link.symlink_to(self.root / target)
            self.assertIn("torch/_overlay: a symbolic link", self.refused(self.root))
            self.assertTrue(link.is_symlink())
            link.unlink()

    def test_a_torch_folder_that_is_a_link_is_the_tree_that_it_leads_to(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            Path(name, "torch").symlink_to(self.root / "torch")
            self.succeeds(name)
            self.assertTrue((self.root / "torch" / "_overlay").is_dir())
            self.succeeds("--reverse", name)
        self.assertEqual(self.pristine, snapshot(self.root))

    def test_files_of_the_user_stay(self) -> None:
        self.succeeds(self.root)
        folder = (self.root / self.NEW).parent
        (folder / "__pycache__").mkdir()
        kept = [folder / "notes.txt", folder / "__pycache__" / "notes.txt", folder / "__pycache__" / "x.pyc"]
        for path in kept:
            path.write_text("of the user\n")
        self.assertIn(f"kept, for it is not of the series: {kept[0]}", self.succeeds("--reverse", self.root))
        for path in kept:
            self.assertEqual(path.read_text(), "of the user\n")
        shutil.rmtree(self.root / "torch" / "_overlay")
        self.assertEqual(self.pristine, snapshot(self.root))

    def test_hard_links_to_the_old_files_keep_the_old_text(self) -> None:
        link = self.root / "linked.py"
        os.link(self.root / self.EDITED[0], link)
        text = link.read_bytes()
        self.succeeds(self.root)
        self.assertEqual(link.read_bytes(), text)

    def test_bytecode_in_new_folders_goes_with_them(self) -> None:
        self.succeeds(self.root)
        cache = (self.root / self.NEW).parent / "__pycache__"
        cache.mkdir()
        (cache / "module.pyc").write_bytes(b"")
        self.succeeds("--reverse", self.root)
        self.assertEqual(self.pristine, snapshot(self.root))


@form.overlay_only
class TestUnfinishedRuns(SmallTree):
    """What the next run makes of a tree that a killed run has left: see patch_faults.py, which finds all of them."""

    def faults(self, kind: str) -> dict[str, int]:
        command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("patch_faults.py")), kind]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return json.loads(result.stdout)

    def test_killed_before_every_operation(self) -> None:
        found = self.faults("kill")
        self.assertGreater(found["unfinished"], 10)
        self.assertGreater(found["whole"], 40)

    def test_errors_from_every_operation_on(self) -> None:
        found = self.faults("errors")
        self.assertGreater(found["No space left on device"], 100)
        self.assertGreater(found["half changed"], 10)

    def test_two_runs_at_once(self) -> None:
        self.assertEqual(self.faults("races")["pairs"], 48)

    def killed(self, root: Path, *options: str) -> None:
        """A run that is killed when it has changed one file of the small tree."""
        files = [*root.rglob("*.py")]
        before = {path: path.read_bytes() for path in files}

        def fault(count: int, kind: str) -> None:
            if any(not path.exists() or path.read_bytes() != text for path, text in before.items()):
                os.kill(os.getpid(), signal.SIGKILL)

        self.assertTrue(patch_faults.run(root, *options, fault=patch_faults.guarded(fault)).killed)

    def test_folders_that_may_not_be_written(self) -> None:
        """The files of one of them come after others, which are put back."""

        def as_somebody(count: int, kind: str) -> None:
            if os.getuid() == 0:
                os.setuid(SOMEBODY)

        for name in ("torch/sub", "torch"):
            root = self.small()
            root.parent.chmod(0o755)
            for path in (root, *root.rglob("*")) if os.getuid() == 0 else ():
                os.chown(path, SOMEBODY, -1, follow_symlinks=False)
            (root / name).chmod(0o555)
            before = snapshot(root)
            with self.subTest(name):
                result = patch_faults.run(root, fault=as_somebody)
                self.assertEqual(result.status, 1)
                self.assertRegex(result.output, rf"Permission denied: .*{name}.*\nNothing was changed")
                self.assertEqual(snapshot(root), before)
            (root / name).chmod(0o755)

    def test_files_of_the_user_with_the_name_of_the_folder_stay(self) -> None:
        link = self.root / "torch" / ".apply_patches_link"
        link.symlink_to(self.root)
        (self.root / "torch" / ".apply_patches").touch()
        before = snapshot(self.root)
        self.succeeds(self.root)
        self.succeeds("--reverse", self.root)
        self.assertEqual(snapshot(self.root), before)

    def test_output_that_nobody_can_read_changes_nothing_in_what_is_done(self) -> None:
        """A pipe that was closed, and a log on a disk that is full."""
        root, before = self.root, self.pristine
        reader, closed = os.pipe()
        os.close(reader)
        with open(closed, "w") as pipe, Path("/dev/full").open("w") as full:
            for output, options, message in (
                (pipe, (), ""),
                (full, ("--reverse",), ""),
                (full, ("--reverse",), "not applied"),
            ):
                result = subprocess.run(
                    [sys.executable, "-S", "-c", TOOL, str(series.BASE), str(series.ROOT), *options, str(root)],
                    env={**os.environ, "PYTHONPATH": str(form.ROOT / "tools")},
                    stdout=output,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                self.assertEqual(result.returncode, int(bool(message)), result.stderr)
                self.assertIn(message, result.stderr)
                self.assertEqual(snapshot(root) == before, bool(options))

    def test_a_file_that_was_edited_since_is_not_overwritten(self) -> None:
        for name in ("a.py", "_overlay/deep/c.py"):
            root = self.small()
            self.killed(root)
            file = root / "torch" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("of the user\n")
            before = snapshot(root)
            for options in ((), ("--check",), ("--reverse",)):
                with self.subTest(name, options=options):
                    result = patch_faults.run(root, *options)
                    self.assertEqual(result.status, 1)
                    self.assertRegex(result.output, rf"torch/{name}: (SHA-256|exists already)")
                    self.assertIn("Nothing was changed", result.output)
                    self.assertEqual(snapshot(root), before)

    def test_a_run_waits_for_the_one_at_work_and_check_says_so(self) -> None:
        root = self.root
        with apply_patches.locked(root):
            self.assertIn("another run is at work", patch_faults.run(root, "--check").output)
            child = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", WAITS, str(form.ROOT / "tools"), str(root)],
                stderr=subprocess.PIPE,
                text=True,
            )
            assert child.stderr is not None
            self.assertIn("waiting for it", child.stderr.readline())
            self.assertIsNone(child.poll())
        with child.stderr:
            self.assertEqual(child.wait(60), 0)
        self.assertEqual([path.name for path in (root / "torch").glob(".*")], [])

    def test_interrupted_run_puts_back_what_it_changed(self) -> None:
        def fault(count: int, kind: str) -> None:
            nonlocal renames
            renames += kind == "os.rename"
            if renames == 2:
                renames += 1
                raise KeyboardInterrupt

        renames = 0
        self.assertIn("KeyboardInterrupt", patch_faults.run(self.root, fault=fault).output)
        self.assertEqual(snapshot(self.root), self.pristine)

    def test_new_files_are_on_the_disk_before_the_tree_changes(self) -> None:
        """A power cut may lose what no fsync has come after."""
        kinds = Path(self.enterContext(tempfile.TemporaryDirectory()), "kinds")

        def fault(count: int, kind: str) -> None:
            with kinds.open("a") as file:
                file.write(f"{kind}\n")

        self.assertEqual(patch_faults.run(self.root, fault=patch_faults.guarded(fault)).status, 0)
        before, changes = kinds.read_text().split("os.rename", 1)
        self.assertEqual(before.split().count("fsync"), 1 + changes.split().count("os.rename"))
        self.assertNotIn("fsync", changes)


@form.overlay_only
class TestSeries(SmallTree):
    """A series that is not whole is refused before anything is touched."""

    def setUp(self) -> None:
        super().setUp()
        self.patches = self.root.parent / "patches" / "v0"

    def refused(self, *options: object) -> str:
        for arguments in (options, (*options, "--check")):
            output = super().refused(*arguments, self.root)
            self.assertLessEqual(len(output.splitlines()), 2)
        return output

    def test_cut_off_anywhere(self) -> None:
        for path in self.patches.iterdir():
            whole = path.read_bytes()
            ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")][:-1]
            for end in sorted({0, *ends, len(whole) // 2, len(whole) - 2}):
                with self.subTest(path.name, end=end), self.assertRaisesRegex(series.SeriesError, "SHA256SUMS|series"):
                    path.write_bytes(whole[:end])
                    series.read_series(self.patches)
            path.write_bytes(whole[: ends[-1]] if ends else b"")
            self.refused()
            path.write_bytes(whole)
        self.assertEqual(patch_faults.run(self.root).status, 0)

    def test_garbled_in_a_later_hunk(self) -> None:
        path = self.patches / "one.patch"
        path.write_bytes(path.read_bytes().replace(b"+# second", b"+# sec\xffnd"))
        self.assertIn("one.patch cannot be read", self.refused())
        path.write_bytes(path.read_bytes().replace(b"\xff", b"u"))
        self.assertIn("one.patch is not what SHA256SUMS says", self.refused())

    def test_a_line_is_missing(self) -> None:
        for name, line in (("series", "two.patch\n"), ("series", "one.patch\n"), ("two.patch", "+x\n")):
            path = self.patches / name
            text = path.read_text()
            path.write_text(text.replace(line, ""))
            self.assertIn(f"{name} is not what SHA256SUMS says", self.refused())
            path.write_text(text)

    def test_a_patch_or_the_sums_are_missing(self) -> None:
        for name in ("two.patch", "series", series.SUMS):
            text = (self.patches / name).read_text()
            (self.patches / name).unlink()
            self.assertIn(f"{name} cannot be read", self.refused())
            (self.patches / name).write_text(text)

    def test_a_sum_of_no_patch(self) -> None:
        with (self.patches / series.SUMS).open("a") as file:
            file.write(f"{series.sha256('')}  three.patch\n")
        self.assertIn("three.patch: in SHA256SUMS, not in the series", self.refused())

    def test_sha256sum_reads_the_sums(self) -> None:
        for folder in (self.patches, form.ROOT / "patches" / "v2.15.0"):
            subprocess.run(["sha256sum", "--check", "--strict", "--quiet", series.SUMS], cwd=folder, check=True)

    def test_base_json_is_missing_or_broken(self) -> None:
        text = series.BASE.read_text()
        series.BASE.unlink()
        self.assertIn("base.json cannot be read", self.refused())
        for broken in ("", text[:-3], "[]", "{}", '{"tag": 3, "files": {}}', '{"tag": "v0"}'):
            series.BASE.write_text(broken)
            self.assertRegex(
                self.refused(), r"base\.json (cannot be read|has no tag or no files).*fingerprint\.py --write"
            )

    def test_utf_8_whatever_the_locale(self) -> None:
        environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
        root = self.root.rename(self.root.with_name("bäume"))
        command = [sys.executable, "-S", "-c", TOOL, str(series.BASE), str(series.ROOT)]
        for options in ([], ["--reverse"]):
            result = subprocess.run(
                [*command, *options, str(root)],
                env={**environment, "PYTHONPATH": str(form.ROOT / "tools")},
                capture_output=True,
            )
            self.assertEqual(result.returncode, 0, result.stderr)
            if not options:
                self.assertIn("“first”", (root / "torch" / "a.py").read_bytes().decode())
        self.assertEqual(snapshot(root), self.pristine)


class TestUnifiedDiff(unittest.TestCase):
    """The strict dialect: a hunk applies at its own line, to its own context, or not at all."""

    OLD = "".join(f"line {i}\n" for i in range(30))

    NEW = OLD.replace("line 15", "new\nline 15")

    def diff(self, new: str) -> str:
        return series.edit_diff("torch/a.py", self.OLD, new)

    def change(self, new: str) -> series.FileChange:
        (change,) = series.parse_patch("p", "Subject: x\n\n" + self.diff(new)).changes
        return change

    def test_insertions_anywhere(self) -> None:
        for positions in ([0], [1], [15], [29], [30], [0, 30], [3, 5, 12, 20], [3, 10], [3, 9]):
            with self.subTest(positions=positions):
                lines = self.OLD.split("\n")
                for position in sorted(positions, reverse=True):
                    lines[position:position] = [f"new {position}", "second"]
                new = "\n".join(lines)
                change = self.change(new)
                self.assertEqual(series.apply_change(change, self.OLD), new)
                self.assertEqual(series.apply_change(change, new, reverse=True), self.OLD)

    def test_no_offset_and_no_fuzz(self) -> None:
        change = self.change(self.NEW)
        for text in ("shifted\n" + self.OLD, self.OLD.replace("line 13\n", "line 13 \n"), self.OLD[:40]):
            with self.subTest(text[:8]), self.assertRaisesRegex(series.SeriesError, "torch/a.py"):
                series.apply_change(change, text)
        self.assertIsNotNone(series.apply_change(change, self.OLD.replace("line 5\n", "line five\n")))

    def test_new_files(self) -> None:
        for text in ("", "one\n", "one\n\n-two\n@@ three\n"):
            diff = series.new_file_diff(series.new_file("torch/b.py", text))
            (change,) = series.parse_patch("p", "Subject: x\n\n" + diff).changes
            with self.subTest(text):
                self.assertEqual(series.apply_change(change, None), text)
                self.assertIsNone(series.apply_change(change, text, reverse=True))
                with self.assertRaisesRegex(series.SeriesError, "exists already"):
                    series.apply_change(change, text)

    def test_a_file_without_a_last_line_break_is_refused(self) -> None:
        with self.assertRaises(series.SeriesError):
            series.new_file("torch/b.py", "text")

    def test_a_truncated_or_foreign_patch_is_refused(self) -> None:
        whole = self.diff(self.NEW)
        hunk = whole.index("@@")
        for broken in (
            whole[: whole.index("+new")],
            whole.replace("torch/a.py", "../a.py"),
            whole[:hunk],
            whole + whole[hunk:].replace("@@ -", "@ -"),
            whole.replace("--- a/", "new file mode 120000\n--- a/")[: hunk + 20],
        ):
            with self.assertRaises(series.SeriesError):
                series.parse_patch("p", broken)
