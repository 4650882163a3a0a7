"""The landing stack: each patch applies to the base, its tests pass with it, and fail without its edits."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, TestCase

import form


if not form.PATCHED:
    import export_upstream
    import run_patched
    from export_upstream import PullRequest
    from series import apply_change, installed_root, parse_patch, SeriesError

if TYPE_CHECKING:
    from collections.abc import Mapping

EVERY = [] if form.PATCHED else export_upstream.declared()
QUICK = "wrapped-numbers"  # compiles nothing
NAMES = [QUICK, *[request.name for request in EVERY if request.name != QUICK]]


def named(name: str) -> PullRequest:
    return {request.name: request for request in EVERY}[name]


@form.overlay_only
class TestStack(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.copy = Path(tempfile.mkdtemp(prefix="upstream_torch_"))
        cls.addClassCleanup(shutil.rmtree, cls.copy, ignore_errors=True)
        run_patched.make_copy(installed_root(), cls.copy)

    @unittest.skipUnless(
        importlib.util.find_spec("ruff") and importlib.util.find_spec("clang_format"),
        "ruff and clang-format format new files: tools/setup lint",
    )
    def test_it_is_what_the_declarations_say(self):
        """From a folder whose configuration of ruff is another, too."""
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("ruff.toml").write_text('line-length = 60\n[format]\nquote-style = "single"\n')
            self.assertEqual(export_upstream.main(["--check"]), 0)

    def run_tests(self, tests: Mapping[str, str]) -> tuple[int, str]:
        """Run test files, each as upstream does. Return the first status that is not 0, and the output."""
        run = ""
        env = run_patched.environment(self.copy) | {"TORCH_OVERLAY_DISABLE": "1", "PYTHONPATH": str(self.copy)}
        env.pop("CI", None)  # there upstream's run_tests writes reports, with packages that are not required
        files = {Path(path).name: text for path, text in tests.items()}
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            for name in files:
                done = subprocess.run(
                    [sys.executable, name], env=env, cwd=folder, capture_output=True, text=True, timeout=600
                )
                run += done.stderr + done.stdout
                if done.returncode:
                    return done.returncode, run
        return 0, run

    def replace(self, texts: Mapping[str, str]) -> None:
        """Put files into the copy, whose other files are links to those of the installed tree."""
        for path, text in texts.items():
            target = self.copy / path
            target.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
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
    def test_fails_without_its_edits_and_passes_with_them(self, name):
        request = named(name)
        before = export_upstream.with_needs(request, EVERY)
        after = request.edited(before)
        self.replace(before)
        status, said = self.run_tests(request.tests)
        without = r"No module named|cannot import name|module '\w+' has no attribute|\.h: No such file"
        if after:
            without = r"FAILED \((failures|errors)="
        self.assertRegex(said, without, "its tests pass without it")
        self.assertNotEqual(status, 0)
        self.replace({**after, **request.files})
        status, said = self.run_tests(request.tests)
        self.assertEqual(status, 0, said)


@form.overlay_only
class TestDeclarations(TestCase):
    """What a declaration may not say."""

    def declare(self, **changes: str) -> str:
        """The error for a declaration in which texts are replaced."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "wrapped-numbers")
            shutil.copytree(export_upstream.folder() / "wrapped-numbers", path)
            for name, (old, new) in changes.items():
                file = (
                    path
                    / {"toml": "pull_request.toml", "edits": "edits.patch", "test": "test_wrapped_numbers.py"}[name]
                )
                text = file.read_text()
                self.assertIn(old, text)
                file.write_text(text.replace(old, new))
            with self.assertRaises(SeriesError) as caught:
                export_upstream.read(path)
            return str(caught.exception)

    def test_what_is_refused(self):
        self.assertIn("mentions the overlay", self.declare(edits=("A mode gets", "An overlay gets")))
        self.assertIn("is no seam", self.declare(toml=("__torch_dispatch__", "__torch__")))
        self.assertIn("is not declared", self.declare(toml=("upstream_fixes.wrapped_numbers", "upstream_fixes.other")))
        self.assertIn("no declaration", self.declare(toml=('test_wrapped_numbers.py"\n', 'another.py"\n')))
        self.assertIn("more than 72", self.declare(toml=("[aotautograd]", "[aotautograd]" + " very" * 10)))
        self.assertIn(
            "more than 80", self.declare(toml=("The number is a tensor", "The number is a tensor" + " x" * 30))
        )

    def test_module_that_is_not_listed(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "relaunch-proof")
            shutil.copytree(export_upstream.folder() / "relaunch-proof", path)
            toml = path / "pull_request.toml"
            lines = [line for line in toml.read_text().splitlines() if "proof.nodes" not in line]
            toml.write_text("\n".join(lines))
            with self.assertRaisesRegex(SeriesError, r"torch_overlay\S*proof\.nodes is imported or named"):
                export_upstream.read(path)

    def test_names_of_modules_in_comments(self):
        relaunch = "torch_overlay._inductor.relaunch"
        names = {f"{relaunch}.memory.packing": "torch._inductor.cudagraph_relaunch.packing"}
        self.assertIn("(`packing`)", export_upstream._renamed(f"{relaunch}.memory.arrange", names))
        text = export_upstream._renamed(f"{relaunch}.graph.concurrency", names)
        self.assertIn(f"(`{relaunch}.proof.prove`)", text)  # it is not there, which is refused
        text = named("relaunch-concurrency").files["torch/_inductor/cudagraph_relaunch/concurrency.py"]
        self.assertIn("(`prove`)", text)

    def test_group_of_counters(self):
        text = export_upstream._renamed("torch_overlay._inductor.relaunch.launch.memcpy_nodes", {})
        self.assertIn('counters["inductor"]["cudagraph_rebuilds"] += 1', text)

    def test_options(self):
        names = {"torch_overlay.config": "torch._inductor.config.triton"}
        text = export_upstream._renamed("torch_overlay._inductor.relaunch.causes", names)
        self.assertIn("or raise torch._inductor.config.triton.cudagraph_templates", text)
        text = export_upstream._renamed("torch_overlay._inductor.relaunch.runner", names)
        self.assertIn("from torch._inductor.config import triton as config\n", text)

    def test_all_edits_fit_one_tree(self):
        """Those of one file that don't need each other, too."""
        texts: dict[str, str] = {}
        for request in EVERY:
            texts |= {**request.edited(texts), **request.files}
        for path, text in texts.items():
            if path.endswith(".py"):
                compile(text, path, "exec")

    def test_edit_that_does_not_fit_the_base(self):
        request = named("wrapped-numbers")
        with self.assertRaisesRegex(SeriesError, "not what the patch expects"):
            request.edited({path: "nothing\n" for path in request.edited({})})

    def test_edit_of_lines_that_were_moved(self):
        """By edits of the same file by what it needs, which the declaration doesn't count."""
        request = named("wrapped-numbers")
        ((path, edited),) = request.edited({}).items()
        base = (installed_root() / path).read_text()
        self.assertEqual(request.edited({path: f"# moved\n\n{base}"}), {path: f"# moved\n\n{edited}"})
        self.assertEqual(request.edited({path: base.partition("\n")[2]}), {path: edited.partition("\n")[2]})

    def test_patch_that_is_too_long(self):
        request = named("wrapped-numbers")
        with mock.patch.object(export_upstream, "MOST_LINES", 10), self.assertRaisesRegex(SeriesError, "at most 10"):
            export_upstream.patch_of(request, {})

    def test_needs(self):
        other = EVERY[0]
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(export_upstream, "folder", lambda: Path(folder)),
        ):
            for name, needs in (("a", '["b"]'), ("b", "[]")):
                shutil.copytree(
                    export_upstream.__dict__["series_folder"]() / "upstream" / other.name, Path(folder, name)
                )
                toml = Path(folder, name, "pull_request.toml")
                toml.write_text(toml.read_text().replace("needs = []", f"needs = {needs}"))
            self.assertEqual([request.name for request in export_upstream.declared()], ["b", "a"])
            toml = Path(folder, "b", "pull_request.toml")
            toml.write_text(toml.read_text().replace("needs = []", 'needs = ["a"]'))
            with self.assertRaisesRegex(SeriesError, "a needs b needs a"):
                export_upstream.declared()

    def test_edits_are_what_the_patch_has(self):
        for request in EVERY:
            text = (export_upstream.folder() / f"{request.name}.patch").read_text()
            body = text.partition("\n---\n\n")[2].removesuffix("--\n2.15.0\n")
            changes = {change.path: change for change in parse_patch(request.name, body, ("torch/", "test/")).changes}
            before = export_upstream.with_needs(request, EVERY)
            after = request.edited(before)
            for path, wanted in after.items():
                text = before.get(path) or (installed_root() / path).read_text()
                self.assertEqual(apply_change(changes[path], text), wanted)
            self.assertEqual(changes.keys(), after.keys() | request.tests.keys() | request.files.keys())

    def test_each_has_a_row_in_the_documents(self):
        text = (form.ROOT / "docs" / "upstreaming.md").read_text()
        rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
        self.assertEqual(sorted(rows), sorted(request.name for request in EVERY))
        for request in EVERY:
            needs = ", ".join(f"`{name}`" for name in request.needs)
            self.assertTrue(not needs or rows[request.name].endswith(f"| {needs} |"), rows[request.name])

    def test_each_module_of_the_compiler_is_there(self):
        """As a new file, or by the seams that call it."""
        overlay = form.ROOT / "torch_overlay"
        files = [path for part in ("_dynamo", "_functorch", "_inductor") for path in (overlay / part).rglob("*.py")]
        there = {path.relative_to(overlay).with_suffix("").as_posix() for path in files if path.stem != "__init__"}
        for request in EVERY:
            names = {*request.modules, *request.names}
            there -= {name.removeprefix("torch_overlay.").replace(".", "/") for name in names}
        self.assertEqual(sorted(there), [])


@form.overlay_only
class TestImports(TestCase):
    """What a pull request of some modules would pull in."""

    def table(self, *modules: str) -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(export_upstream.main(["--imports", *modules]), 0)
        return out.getvalue().splitlines()

    def test_modules_and_what_they_import(self):
        check, trace, total = self.table("torch_overlay.analysis.race_check.happens_before")
        self.assertRegex(check, r"^ *\d+ analysis\.race_check\.happens_before: analysis\.race_check\.trace$")
        self.assertRegex(trace, r"^ *\d+ analysis\.race_check\.trace \[besides\]: nothing$")
        lines = [int(row.split()[0]) for row in (check, trace)]
        self.assertEqual(
            total, f"1 modules with {lines[0]} lines; besides, not in the stack: 1 modules with {lines[1]} lines"
        )

    def test_what_the_stack_has(self):
        rows = self.table("torch_overlay._inductor.relaunch.memory")
        found = {row.split()[1].rpartition(".")[2]: row for row in rows}
        self.assertIn("packing [relaunch-packing]: nothing", found["packing"])
        self.assertIn("nodes [relaunch-proof]: nothing", found["nodes"])
        self.assertIn("not in the stack: 0 modules", rows[-1])

    def test_module_that_is_not_there(self):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            self.assertEqual(export_upstream.main(["--imports", "torch_overlay.nothing"]), 1)
        self.assertEqual(err.getvalue(), "torch_overlay.nothing: there is no such module\n")


instantiate_parametrized_tests(TestStack)
