"""Modules that have seams and come in other ways: past our finder, by loaders that others have wrapped, by hand."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import textwrap
import unittest
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from unittest import mock

from import_hooks import ChainedLoader, install, Instrumenter, Watchdog

import form
from fake_upstream import FakeUpstream, OURS, UPSTREAM


if not form.PATCHED:
    from torch_overlay._engine.report import make_status
    from torch_overlay.errors import OverlayError


class WithFinders(FakeUpstream):
    def setUp(self) -> None:
        super().setUp()
        finders = list(sys.meta_path)
        self.addCleanup(lambda: sys.meta_path.__setitem__(slice(None), finders))

    def enabled(self, *seams):
        return super().enabled(*(seams or ("plain", "Thing.method")))

    def states(self, installer) -> set[str]:
        with mock.patch("torch_overlay._engine.report.FEATURES", {}):
            status = make_status(installer)
        self.assertEqual("missed" in status.why, any(s.state == "missed" for s in status.seams), status.why)
        return {s.state for s in status.seams}


@form.overlay_only
class TestFindersThatAskOthers(WithFinders):
    def test_finder_that_asks_all_finders_from_within_its_own(self) -> None:
        for when in ("before", "after"):
            with self.subTest(when):
                self.forget()
                installer = None if when == "before" else self.enabled()
                watchdog = install(Watchdog())
                installer = installer or self.enabled()
                module = self.load()
                self.assertEqual((module.plain(1), self.states(installer)), (20, {"installed"}))
                self.assertEqual(watchdog.seen.count("torchfake.upstream"), 1)
                module = importlib.reload(module)  # a finder that asks all finders may give the spec that is there
                installer.before_compilation()
                self.assertEqual((module.plain(1), self.states(installer)), (20, {"installed"}))
                installer.disable()
                self.assertEqual((module.plain(1), module.Thing().method(1)), (2, 8))
                sys.meta_path.remove(watchdog)

    def test_loader_keeps_what_another_library_put_there(self) -> None:
        install(Watchdog())
        self.enabled()
        loader = self.load().__spec__.loader
        self.assertIsInstance(loader, ChainedLoader)
        self.assertEqual(loader.exec_module, loader._exec_module)

    def test_module_that_is_looked_for_before_it_is_imported(self) -> None:
        loaders: dict[str, SourceFileLoader] = {}

        class Same:
            """Gives the same loader each time."""

            def find_spec(self, fullname, path=None, target=None):
                spec = PathFinder.find_spec(fullname, path, target)
                if spec is not None and fullname.startswith("torchfake."):
                    spec.loader = loaders.setdefault(fullname, spec.loader)
                return spec

        install(Same())
        self.enabled()
        for _ in range(3):
            self.assertIsNotNone(importlib.util.find_spec("torchfake.upstream"))
        self.assertEqual(self.load().plain(1), 20)
        self.assertNotIn("exec_module", vars(loaders["torchfake.upstream"]))

    def test_two_overlays_of_different_modules_find_each_other(self) -> None:
        first, second = self.enabled("plain"), self.enabled("cached")
        module = self.load()
        self.assertEqual((module.plain(1), module.cached(1)), (20, 30))
        first.disable()
        second.disable()
        self.assertEqual((module.plain(1), module.cached(1)), (2, 3))


@form.overlay_only
class TestModulesLoadedPast(WithFinders):
    """... get their seams before something is compiled."""

    def check(self, installer, module) -> None:
        """They are missing, and then there, and the finder is the first again."""
        self.assertEqual((module.plain(1), self.states(installer)), (2, {"missed"}))
        with self.assertLogs("torch_overlay", "WARNING") as logs:
            installer.before_compilation()
        self.assertIn("loaded torchfake.upstream past the overlay", logs.output[0])
        self.assertIn("torch._dynamo.reset()", logs.output[0])
        self.assertEqual((module.plain(1), module.Thing().method(1)), (20, 80))
        self.assertEqual(self.states(installer), {"installed"})
        self.assertIs(sys.meta_path[0], installer.finder)
        self.assertEqual(sys.meta_path.count(installer.finder), 1)
        with self.assertNoLogs("torch_overlay", "WARNING"):
            installer.before_compilation()
        installer.disable()
        self.assertEqual((module.plain(1), module.Thing().method(1), self.states(installer)), (2, 8, {"off"}))

    def test_by_a_finder_that_stands_before_ours(self) -> None:
        installer = self.enabled()
        finder = install(Instrumenter("torchfake"))
        holder = self.load("holder")
        module = self.load()
        self.assertGreater(finder.loaded, 0)
        self.check(installer, module)
        self.assertIs(holder.plain, module.plain)

    def test_module_that_was_looked_for_before(self) -> None:
        """To find a module is not to load it."""
        installer = self.enabled()
        self.assertIsNotNone(importlib.util.find_spec("torchfake.upstream"))
        install(Instrumenter("torchfake"))
        self.check(installer, self.load())

    def test_those_who_took_a_function_by_value_meanwhile(self) -> None:
        installer = self.enabled()
        install(Instrumenter("torchfake"))
        module, holder = self.load(), self.load("holder")
        installer.before_compilation()
        self.assertEqual((holder.plain(1), holder.other_name(1)), (20, 20))
        self.assertIs(holder.plain, module.plain)

    def test_module_that_comes_after_a_compilation_gets_them_at_once(self) -> None:
        """... through the finder that stands in the way, too."""
        installer = self.enabled()
        finder = install(Instrumenter("torchfake"))
        installer.before_compilation()
        self.assertEqual((self.load().plain(1), self.states(installer)), (20, {"installed"}))
        self.assertGreater(finder.loaded, 0)

    def test_by_hand(self) -> None:
        installer = self.enabled()
        path = self.root / "torchfake" / "upstream.py"
        spec = importlib.util.spec_from_file_location("torchfake.upstream", path)
        module = sys.modules["torchfake.upstream"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.check(installer, module)

    def test_when_somebody_took_our_finder_away(self) -> None:
        installer = self.enabled()
        sys.meta_path.remove(installer.finder)
        self.check(installer, self.load())

    def test_by_a_loader_that_takes_no_attributes(self) -> None:
        class Slots:
            __slots__ = ("loader",)

            def __init__(self, loader) -> None:
                self.loader = loader

            def create_module(self, spec):
                return None

            def exec_module(self, module) -> None:
                self.loader.exec_module(module)

        class Finder:
            def find_spec(self, fullname, path=None, target=None):
                spec = PathFinder.find_spec(fullname, path, target)
                if spec is not None and fullname == "torchfake.upstream":
                    spec.loader = Slots(spec.loader)
                return spec

        install(Finder())
        installer = self.enabled()
        self.check(installer, self.load())

    def test_by_a_loader_that_is_a_class(self) -> None:
        test = self

        class Loader:
            @classmethod
            def create_module(cls, spec):
                return None

            @classmethod
            def exec_module(cls, module) -> None:
                SourceFileLoader("torchfake.upstream", module.__file__).exec_module(module)

        class Finder:
            def find_spec(self, fullname, path=None, target=None):
                if fullname == "torchfake.upstream":
                    path = test.root / "torchfake" / "upstream.py"
                    return importlib.util.spec_from_file_location(fullname, path, loader=Loader)
                return None

        install(Finder())
        installer = self.enabled()
        before = dict(vars(Loader))
        self.check(installer, self.load())
        self.assertEqual(dict(vars(Loader)), before)

    def test_again(self) -> None:
        """Reloaded in place, or imported anew."""
        for reload in (True, False):
            with self.subTest(reload=reload):
                self.forget()
                installer = self.enabled()
                module = self.load()
                self.assertEqual(module.plain(1), 20)
                finder = install(Instrumenter("torchfake"))
                if reload:
                    importlib.reload(module)
                else:
                    del sys.modules["torchfake.upstream"]
                    module = self.load()
                self.check(installer, module)
                sys.meta_path.remove(finder)

    def test_somebody_who_wraps_a_hook_changes_nothing(self) -> None:
        installer = self.enabled()
        module = self.load()
        hook = module.plain
        for theirs in (lambda x: hook(x) + 1, functools.wraps(hook)(lambda x: hook(x) + 1)):
            with mock.patch.object(module, "plain", theirs), self.assertNoLogs("torch_overlay", "WARNING"):
                installer.before_compilation()
                self.assertEqual((module.plain(1), self.states(installer)), (21, {"installed"}))

    def test_what_a_seam_left_as_it_is_or_somebody_took_away_is_not_missed(self) -> None:
        self.write("torchfake_ours.py", OURS + "\ndef unchanged(original):\n    return original\n")
        installer = self.enabled(self.seam("plain", "unchanged", "replace"), "Thing.method")
        module = self.load()
        with mock.patch.object(module, "Thing", None), self.assertNoLogs("torch_overlay", "WARNING"):
            installer.before_compilation()
        self.assertEqual(self.states(installer), {"installed"})

    def test_another_thread_is_faster(self) -> None:
        """It installs what is missed, and says so, or disables the overlay, while this one waits for imports."""
        for other, warnings in (("before_compilation", 1), ("disable", 0)):
            with self.subTest(other):
                self.forget()
                installer = self.enabled()
                finder = install(Instrumenter("torchfake"))
                module = self.load()
                sys.meta_path.remove(finder)

                def other_thread(names, installer=installer, other=other) -> None:
                    del installer._wait_for_imports
                    getattr(installer, other)()

                installer._wait_for_imports = other_thread
                with mock.patch("torch_overlay._engine.install.log") as log:
                    installer.before_compilation()
                self.assertEqual(log.warning.call_count, warnings)
                self.assertEqual(module.plain(1), 20 if warnings else 2)

    def test_disabled_without_a_compilation(self) -> None:
        installer = self.enabled()
        module = self.load()
        install(Instrumenter("torchfake"))
        importlib.reload(module)
        installer.disable()
        self.assertEqual((module.plain(1), self.states(installer)), (2, {"off"}))
        self.assertNotIn("LateImportFinder", [type(finder).__name__ for finder in sys.meta_path][:1])

    def test_from_another_file(self) -> None:
        """Its source is not the one that was checked: an error, and the overlay is off."""
        (self.root / "elsewhere.py").write_text(textwrap.dedent(UPSTREAM))

        class Finder:
            def find_spec(finder, fullname, path=None, target=None):
                if fullname == "torchfake.upstream":
                    return importlib.util.spec_from_file_location(fullname, self.root / "elsewhere.py")
                return None

        installer = self.enabled()
        install(Finder())
        module = self.load()
        with self.assertRaises(OverlayError) as caught:
            installer.before_compilation()
        self.assertEqual((caught.exception.reason, caught.exception.target), ("source_changed", "torchfake.upstream"))
        self.assertIn("elsewhere.py, by SourceFileLoader", str(caught.exception))
        self.assertFalse(installer.enabled)
        self.assertIn("loaded past torch_overlay", installer.off_because)
        self.assertEqual(module.plain(1), 2)

    def test_from_another_file_before_we_enable(self) -> None:
        (self.root / "elsewhere.py").write_text(textwrap.dedent(UPSTREAM))
        spec = importlib.util.spec_from_file_location("torchfake.upstream", self.root / "elsewhere.py")
        module = sys.modules["torchfake.upstream"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.assertIn("elsewhere.py", str(self.refused("source_changed", self.seam("plain"))))

    def test_in_the_middle_of_a_compilation(self) -> None:
        """A part of it ran without them."""
        installer = self.enabled()
        install(Instrumenter("torchfake"))
        module = self.load()
        with self.assertRaises(OverlayError) as caught:
            installer.before_compilation(is_inner=True)
        self.assertEqual(caught.exception.reason, "loaded_past")
        self.assertEqual((module.plain(1), installer.enabled), (2, False))
        installer.enable()
        self.assertEqual(module.plain(1), 20)


@form.overlay_only
class TestCompilation(unittest.TestCase):
    """A stream program in a process with an import hook compiles to what it compiles to without one."""

    PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from import_hooks import *
import torch
{first}
from torch_overlay.testing import compile_only, simulated_gpu

with simulated_gpu():
    side = torch.cuda.Stream()
    def block(x, w):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = torch.relu(x @ w)
        b = torch.tanh(x @ w)
        torch.cuda.current_stream().wait_stream(side)
        return a + b
    result = compile_only(block, *(torch.randn(1024, 1024, device="cuda") for _ in range(2)))
status = torch_overlay.status()
assert status.enabled and {{s.state for s in status.seams}} <= {{"installed", "waiting"}}, status
print(result.graph_breaks, result.plans[0].table())
"""

    def compiled(self, first: str) -> str:
        code = self.PROGRAM.format(first=first, folder=str(Path(__file__).resolve().parent))
        result = form.run_python(code)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    @form.slow
    def test_with_import_hooks(self) -> None:
        plain = self.compiled("import torch_overlay")
        self.assertTrue(plain.startswith("[] ") and "wait" in plain, plain)
        for first in (
            "install(Watchdog()); import torch_overlay",
            "import torch_overlay; install(Instrumenter('torch')); install(Watchdog())",
        ):
            with self.subTest(first):
                self.assertEqual(self.compiled(first), plain)
