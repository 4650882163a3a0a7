"""tools/export_patches.py: the series is what the seam table says, in the form that upstream would review."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import form
from printed import printed


if not form.PATCHED:
    import export_patches
    import series
    from fingerprint import module_file
    from series import installed_root
    from torch_overlay.seam_table import PATCHES, SEAMS
    from torch_overlay.seams import find_definition, Seam


@form.overlay_only
class TestExport(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.exported = export_patches.export(installed_root())
        names = cls.exported["series"].split()
        cls.patches = [series.parse_patch(name, cls.exported[name]) for name in names]
        cls.patched = cls.after_all()
        cls.trees = {name: ast.parse(text) for name, text in cls.patched.items() if name.endswith(".py")}

    @classmethod
    def after_all(cls) -> dict[str, str]:
        """Path -> text of upstream's files, after the whole series."""
        contents: dict[str, str | None] = {}
        for patch in cls.patches:
            for change in patch.changes:
                if change.path not in contents:
                    path = installed_root() / change.path
                    contents[change.path] = None if change.is_new else path.read_text()
                contents[change.path] = series.apply_change(change, contents[change.path])
        return {name: text for name, text in contents.items() if text is not None}

    def test_the_series_in_the_repository_is_up_to_date(self) -> None:
        self.assertEqual(export_patches.differences(series.series_folder(), self.exported), [])

    def test_in_full_the_first_patch_has_the_modules(self) -> None:
        full = export_patches.export(installed_root(), full=True)
        self.assertEqual(full.keys(), self.exported.keys())
        changed = [name for name in full if full[name] != self.exported[name]]
        self.assertEqual(changed, [self.patches[0].name, series.SUMS])
        first = series.parse_patch("first", full[self.patches[0].name])
        self.assertEqual([c for c in first.changes if c.is_new], [*series.modules().changes])
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            export_patches.main(["--full"])  # would be written over the series of the repository

    def test_the_series_has_the_order_of_the_table(self) -> None:
        slugs = [f"{patch.slug}.patch" for patch in PATCHES]
        self.assertEqual([patch.name for patch in self.patches], [slug for slug in slugs if slug in self.exported])

    def test_every_wrap_seam_is_one_decorator_line_below_descriptors(self) -> None:
        for seam in itertools.chain(*(seam.hooks for seam in SEAMS)):
            if seam.kind != "wrap" or seam.patch is None:
                continue
            with self.subTest(seam.target):
                tree = self.trees[module_file(installed_root(), seam.module).as_posix()]
                decorators = [ast.unparse(d) for d in find_definition(tree, seam.qualname).decorator_list]
                hook = f"wrapped_by('{series.travel(seam.impl)}')"
                self.assertEqual(decorators.count(hook), 1)
                above = decorators[: decorators.index(hook)]
                self.assertTrue(all(re.search(r"method$|property$|setter$", name) for name in above), above)

    def test_every_other_seam_is_one_line_at_the_modules_end(self) -> None:
        for seam in SEAMS:
            if seam.kind in ("wrap", "module") or seam.patch is None:
                continue
            with self.subTest(seam.target):
                tree = self.trees[module_file(installed_root(), seam.module).as_posix()]
                last = [ast.unparse(node) for node in tree.body[-10:]]
                impl = series.travel(seam.impl)
                self.assertIn(f"registered_by('{impl}', __name__)", last)

    def test_upstream_files_only_gain_hook_lines(self) -> None:
        allowed = re.compile(r"\s*@wrapped_by\(.*\)|from torch\._overlay\.hooks import \w+|registered_by\(.*\)|")
        for patch in self.patches:
            for change in patch.changes:
                for hunk in change.hunks if not change.is_new else ():
                    for line in hunk.lines:
                        if line[0] != " ":
                            with self.subTest(patch=patch.name, line=line):
                                self.assertEqual(line[0], "+")
                                self.assertRegex(line[1:], f"^({allowed.pattern})$")

    def test_every_patched_file_imports_each_hook_function_once(self) -> None:
        for name, text in self.patched.items():
            if name.endswith(".py") and "/_overlay/" not in name:
                with self.subTest(name):
                    for function in ("wrapped_by", "registered_by"):
                        imports = len(re.findall(rf"^from torch\._overlay\.hooks import {function}$", text, re.M))
                        self.assertEqual(imports, int(f"{function}(" in text))

    def test_modules_are_copied_unchanged_but_for_the_import_prefix(self) -> None:
        package = form.ROOT / "torch_overlay"
        copied = {change.path.removeprefix("torch/_overlay/"): change for change in series.modules().changes}
        here = {p.relative_to(package).as_posix() for p in package.rglob("*") if "__pycache__" not in p.parts}
        parts = {name for name in here if name.partition("/")[0] == "_engine"} | {*series.ENGINE}
        self.assertEqual(copied.keys(), {name for name in here if (package / name).is_file()} - parts)
        for name, change in copied.items():
            source = package / ("_engine/patched_init.py" if name == "__init__.py" else name)
            with self.subTest(name):
                back = re.sub(r"\btorch\._overlay\b", "torch_overlay", series.file_of(change))
                self.assertEqual(back, source.read_text().replace("torch._overlay", "torch_overlay"))

    def test_no_copied_module_needs_the_package_or_its_engine(self) -> None:
        engine = "|".join(
            name.removesuffix(".py").replace("/", r"\.") for name in series.ENGINE if name.endswith(".py")
        )
        needs = re.compile(rf"(?m)^\s*import torch_overlay$|torch\._overlay\.(_engine|{engine})\b")
        for change in series.modules().changes:
            with self.subTest(change.path):
                if change.path != "torch/_overlay/cudagraphs.py":  # it asks whether the engine is there
                    self.assertNotRegex(series.file_of(change), needs)

    def test_headers_say_why_which_seam_its_status_and_what_ends_it(self) -> None:
        for patch in self.patches:
            with self.subTest(patch.name):
                for field in (r"Subject: \[PATCH\] ", "Description: ", "Forwarded: ", "Base: "):
                    self.assertRegex(patch.header, f"(?m)^{field}.+")
                for seam in SEAMS:
                    if f"{seam.patch}.patch" == patch.name:
                        self.assertIn(f"Seam: {seam.target} ({seam.kind})", patch.header)
                self.assertTrue(all(len(line) < 120 for line in patch.header.splitlines()))

    @form.slow
    def test_check_reports_what_differs_and_changes_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with mock.patch.object(export_patches, "series_folder", return_value=folder):
                self.assertEqual(self.run_tool("--check")[0], 1)
                self.assertEqual(list(folder.iterdir()), [])
                self.assertEqual(self.run_tool()[0], 0)
                self.assertEqual(self.run_tool("--check"), (0, "up to date\n"))
                changed = folder / self.patches[0].name
                changed.write_text(changed.read_text() + "\n")
                (folder / "stray.patch").write_text("")
                status, output = self.run_tool("--check")
                self.assertEqual(status, 1)
                self.assertIn(changed.name, output)
                self.assertIn("stray.patch", output)
                self.assertEqual(self.run_tool()[0], 0)
                self.assertFalse((folder / "stray.patch").exists())
                self.assertEqual(self.run_tool("--check")[0], 0)

    def run_tool(self, *arguments: str) -> tuple[int, str]:
        status, out, errors = printed(export_patches.main, list(arguments))
        return status, out + errors

    def test_a_tree_of_another_release_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            for file in {module_file(installed_root(), seam.module) for seam in SEAMS}:
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).write_text((installed_root() / file).read_text() + "\n")
            status, output = self.run_tool("--check", "--torch", name)
        self.assertEqual(status, 1)
        self.assertIn("is not that of PyTorch", output)

    def test_a_seam_of_an_unknown_patch_is_refused(self) -> None:
        stray = Seam("torch._logging._registrations:", "torch_overlay._logging:register", "register", "none", "", "x")
        with (
            mock.patch.object(export_patches, "SEAMS", (stray,)),
            self.assertRaisesRegex(series.SeriesError, "no patch is called 'none'"),
        ):
            export_patches.export(installed_root())


@form.overlay_only
class TestEdits(unittest.TestCase):
    """Where lines go, on a small file."""

    SOURCE = '''"""Docstring."""

from __future__ import annotations

import os
from torch.alpha import a
from torch.zeta import z
from .near import n


class Thing:
    @staticmethod
    @cached
    def static(x):
        return x

    @property
    def prop(self):
        return 1


LIMIT = 3
'''

    def edit(self, *seams: tuple[str, str], source: str = SOURCE) -> str:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "torch" / "mod.py"
            path.parent.mkdir()
            path.write_text(source)
            with mock.patch.object(export_patches, "base", return_value={"tag": "v", "files": Everything(source)}):
                file = export_patches.UpstreamFile(Path(name), "torch/mod.py")
        for kind, target in seams:
            mark = "" if kind == "register" else "0"
            file.add(Seam(f"torch.mod:{target}", "torch_overlay.x:y", kind, "p", mark, "x"), 0)
        (change,) = series.parse_patch("p", file.diff(0)).changes
        text = series.apply_change(change, source)
        assert text is not None
        return text

    def test_decorators_and_the_import(self) -> None:
        text = self.edit(("wrap", "Thing.static"), ("wrap", "Thing.prop"))
        self.assertIn('    @staticmethod\n    @wrapped_by("torch._overlay.x:y")\n    @cached\n    def static', text)
        self.assertIn('    @property\n    @wrapped_by("torch._overlay.x:y")\n    def prop', text)
        self.assertIn(
            "alpha import a\nfrom torch._overlay.hooks import wrapped_by\nfrom torch.zeta"
            if "_" > "a"
            else "import os\nfrom torch._overlay.hooks import wrapped_by\nfrom torch.alpha",
            text,
        )

    def test_each_function_of_a_module_seam_has_a_decorator(self) -> None:
        names = ("Thing.static", "Thing.prop")
        seam = Seam("torch.mod:", "torch_overlay.x", "module", "p", "0", "x", methods=names)
        hooks = [("wrap", hook.qualname, hook.impl) for hook in seam.hooks]
        self.assertEqual(hooks, [("wrap", name, f"torch_overlay.x:{name[6:]}") for name in names])

    def test_lines_at_the_end(self) -> None:
        text = self.edit(("register", ""), ("register", ""))
        self.assertTrue(text.endswith("LIMIT = 3\n\n\n" + 2 * 'registered_by("torch._overlay.x:y", __name__)\n'), text)

    def test_the_import_of_a_file_without_imports_from_torch(self) -> None:
        text = self.edit(("register", ""), source="import os\nimport sys\n\nx = 1\n")
        self.assertIn("import sys\nfrom torch._overlay.hooks import registered_by\n\nx", text)
        text = self.edit(("register", ""), source="from .a import b\n\nx = 1\n")
        self.assertTrue(text.startswith("from torch._overlay.hooks import registered_by\nfrom .a"))

    def test_what_travels(self) -> None:
        for ours, theirs in (
            ("from torch_overlay.hooks import x", "from torch._overlay.hooks import x"),
            ("from torch_overlay import config", "from torch._overlay import config"),
            ('wrapped_by("torch_overlay.a.b:c")', 'wrapped_by("torch._overlay.a.b:c")'),
            ('counters["torch_overlay"]', 'counters["torch_overlay"]'),
            ("ends with torch_overlay.", "ends with torch_overlay."),
        ):
            self.assertEqual(series.travel(ours), theirs)


class Everything(dict):
    """A base.json that knows the SHA-256 of one text under every name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def get(self, name: str, default: object = None) -> str:
        return series.sha256(self.text)
