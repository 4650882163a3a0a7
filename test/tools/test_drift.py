"""The report of what another PyTorch has changed under the overlay."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

from torch.testing._internal.common_utils import TestCase

import form
from printed import printed


if not form.PATCHED:
    import drift
    from series import installed_root, parse_hunks, SeriesError
    from torch_overlay.seams import fingerprint, Seam


OLD = """
class Scheduler:
    def fuse(self, a):
        return helper(a)

    def sort(self):
        return 1


def lower(x):
    return x


lower = wrapped(lower)
"""


def files(**texts: str) -> drift.Tree:
    """A tree of texts."""
    found = {f"torch/_inductor/{name}.py": text for name, text in texts.items()}
    return drift.Tree(lambda: found, lambda path: found[path].encode())


def seam(qualname: str, kind: str = "wrap", module: str = "scheduler") -> Seam:
    mark = fingerprint(OLD, qualname) if kind != "register" else ""
    return Seam(f"torch._inductor.{module}:{qualname}", "ours:f", kind, "a-patch", mark, "why")  # type: ignore[arg-type]


@form.overlay_only
class TestSeams(TestCase):
    def report(self, qualname: str, **texts: str) -> drift.SeamReport:
        return drift.Seams(files(scheduler=OLD), files(**texts)).report(seam(qualname))

    def test_unchanged(self):
        found = self.report("Scheduler.fuse", scheduler="# more\n\n" + OLD.replace("return 1", "return 2"))
        self.assertEqual((found.state, found.said, found.diff), ("unchanged", "", ""))

    def test_changed(self):
        found = self.report(
            "Scheduler.fuse",
            scheduler=OLD.replace("self, a):\n        return helper(a)", "self, a, b):\n        return other(a, b)"),
        )
        self.assertEqual(found.state, "changed")
        self.assertEqual(
            found.said,
            "2 lines are gone, 2 are new, and its parameters differ; it calls no more helper; it calls newly other",
        )
        self.assertIn("+def fuse(self, a, b):\n+    return other(a, b)\n", found.diff)

    def test_what_a_name_is_bound_to_counts(self):
        found = self.report("lower", scheduler=OLD.replace("wrapped(", "rewrapped("))
        self.assertEqual(found.state, "changed")

    def test_moved(self):
        found = self.report("Scheduler.fuse", scheduler="x = 1\n", planner=OLD)
        self.assertEqual((found.state, found.said), ("moved", "it is in torch/_inductor/planner.py"))

    def test_gone(self):
        found = self.report("Scheduler.fuse", scheduler=OLD.replace("fuse", "fused"))
        self.assertEqual(found.state, "gone")
        self.assertIn("torch/_inductor/scheduler.py has no Scheduler.fuse; names like it: Scheduler.fused", found.said)

    def test_registration_needs_the_module(self):
        compare = drift.Seams(files(scheduler=OLD), files(scheduler="anything"))
        self.assertEqual(compare.report(seam("", "register")).state, "unchanged")
        self.assertEqual(compare.report(seam("", "register", "planner")).state, "gone")

    def test_text_of_a_newer_python(self):
        self.assertEqual(self.report("Scheduler.fuse", scheduler="def f(:\n").state, "gone")


def change(*diff: str, is_new: bool = False) -> drift.FileChange:
    return mock.Mock(path="torch/a.py", is_new=is_new, hunks=tuple(parse_hunks("a", ["", *diff])))


@form.overlay_only
class TestPatches(TestCase):
    TEXT = "".join(f"line {i}\n" for i in range(30))
    HUNK = ("@@ -10,3 +10,4 @@", " line 9", "+new", " line 10", " line 11")

    def check(self, text: str | None, *changes: drift.FileChange) -> drift.PatchReport:
        tree = mock.Mock(read=lambda path: text)
        self.texts: dict[str, str | None] = {}
        return drift.check_patch("a", changes or (change(*self.HUNK),), self.texts, tree)

    def test_applies(self):
        found = self.check(self.TEXT)
        self.assertEqual((found.verdict, found.said), ("applies", []))
        self.assertEqual(self.texts["torch/a.py"], self.TEXT.replace("line 10\n", "new\nline 10\n"))

    def test_applies_elsewhere(self):
        found = self.check("more\n" + self.TEXT)
        self.assertEqual((found.verdict, found.said), ("applies with offset", []))

    def test_needs_work(self):
        for text, said in (
            (self.TEXT.replace("line 10\n", "other\n"), "its lines are not there once"),
            ("more\n" + 2 * self.TEXT, "its lines are not there once"),
            (None, "torch/a.py is gone"),
        ):
            found = self.check(text)
            self.assertEqual(found.verdict, "needs work")
            self.assertIn(said, found.said[0])

    def test_new_file(self):
        new = change(is_new=True)
        self.assertEqual(self.check(None, new).verdict, "applies")
        self.assertEqual(self.check("text", new).said, ["torch/a.py is there already"])


@form.overlay_only
class TestTool(TestCase):
    def run_tool(self, *arguments: str) -> tuple[int, str, str]:
        return printed(drift.main, list(arguments))

    def test_the_base_itself(self):
        status, out, _ = self.run_tool(str(installed_root()))
        self.assertEqual(status, 0, out)
        self.assertIn(" 0 moved, 0 changed, 0 gone", out)
        self.assertNotIn("needs work", out)

    @form.slow
    def test_another_tree_as_a_folder_and_as_a_wheel(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "other")
            for name in drift.FOLDERS:
                shutil.copytree(installed_root() / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            for name in ("torch/utils", "torch/_logging", "torch/autograd", "torch/cuda"):
                shutil.copytree(installed_root() / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            for path in installed_root().glob("torch/*.py"):
                shutil.copy(path, root / "torch" / path.name)
            ir = root / "torch/_inductor/ir.py"
            ir.write_text(ir.read_text().replace("class MutationOutput(", "class MutatedOutput("))
            wheel = Path(folder, "torch-9.9-py3-none-any.whl")
            with zipfile.ZipFile(wheel, "w") as archive:
                for path in root.rglob("*.py"):
                    archive.write(path, path.relative_to(root).as_posix())
            texts = []
            for path in (root, root / "torch", wheel):
                status, out, _ = self.run_tool(str(path), "--out", folder)
                texts.append(out.partition("\n")[2])
                self.assertEqual(status, 1)
                self.assertRegex(
                    out, r"gone +torch\._inductor\.ir:MutationOutput\.__init__  \[inductor-mutation-order\]"
                )
                self.assertIn("names like it: MutatedOutput.__init__", out)
                self.assertTrue(Path(folder, "drift.txt").read_text().startswith(str(path)))
            self.assertEqual(texts[1:], texts[:1] * 2)

    def test_bad_input(self):
        with tempfile.TemporaryDirectory() as folder:
            status, _, err = self.run_tool(folder)
            self.assertEqual((status, err.count("\n")), (2, 1))
            self.assertIn("has no torch/_inductor", err)
            status, _, err = self.run_tool(str(Path(folder, "nothing")))
            self.assertEqual(status, 2)
        for arguments in ((), ("a", "--torch", "2.14.1")):
            with self.assertRaises(SystemExit) as caught:
                self.run_tool(*arguments)
            self.assertEqual(caught.exception.code, 2)

    def test_release_that_is_not_there(self):
        failed = mock.Mock(returncode=1, stderr="ERROR: No matching distribution found for torch==99\n")
        with mock.patch.object(drift.subprocess, "run", return_value=failed):
            status, _, err = self.run_tool("--torch", "99")
        self.assertEqual(status, 2)
        self.assertIn("torch 99 can't be downloaded: ERROR: No matching distribution", err)

    def test_release_is_read_from_its_wheel(self):
        def download(command, **_):
            folder = command[command.index("-d") + 1]
            with zipfile.ZipFile(Path(folder, "torch-2.14.1-cp311.whl"), "w") as archive:
                archive.writestr("torch/_inductor/ir.py", "")
            return mock.Mock(returncode=0)

        with (
            mock.patch.object(drift.subprocess, "run", download),
            mock.patch.object(drift, "compare", wraps=drift.compare) as compare,
            tempfile.TemporaryDirectory() as folder,
        ):
            status, out, _ = self.run_tool("--torch", "2.14.1", "--out", folder)
            self.assertEqual(Path(folder, "drift.txt").read_text().partition("\n")[0], out.partition("\n")[0])
        self.assertEqual(status, 1)
        compare.assert_called_once()
        self.assertTrue(out.startswith("torch 2.14.1, against the base v2.15.0\n"))
        with mock.patch.object(drift, "download", side_effect=SeriesError("no")):
            self.assertEqual(self.run_tool("--torch", "2.14.1")[0], 2)
