"""The one moment at which everything is installed: what comes before it, what begins it, and what comes after it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import textwrap
import threading
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch._guards
from import_hooks import install, Instrumenter, Watchdog

import form
from fake_upstream import FakeUpstream, OURS, UPSTREAM


if not form.PATCHED:
    from torch_overlay._engine.install import Installer
    from torch_overlay._engine.report import make_status
    from torch_overlay.errors import OverlayError


class Moment(FakeUpstream):
    NAMES = ("plain", "Thing.method")

    def states(self, installer: Installer) -> set[str]:
        with mock.patch("torch_overlay._engine.report.FEATURES", {}):
            return {s.state for s in make_status(installer).seams}

    def results(self) -> list[int]:
        module = self.load()
        return [module.plain(1), module.Thing().method(1)]

    def raises(self, reason: str, installer: Installer) -> OverlayError:
        with self.assertRaises(OverlayError) as caught:
            installer.before_compilation()
        self.assertEqual(caught.exception.reason, reason)
        self.assertFalse(installer.enabled)
        self.assertIn(f"[{reason}]", installer.off_because)
        self.assertEqual(installer.changes, {})
        return caught.exception


@form.overlay_only
class TestBefore(Moment):
    def test_nothing_is_imported_or_installed_before_a_compilation(self) -> None:
        installer = self.waiting(*self.NAMES)
        self.assertNotIn("torchfake.upstream", sys.modules)
        self.assertEqual((self.results(), self.states(installer)), ([2, 8], {"waiting"}))
        with mock.patch("torch_overlay._engine.report.FEATURES", {}):
            self.assertEqual(make_status(installer).why, "2 seams wait for the first compilation")
        installer.before_compilation()
        self.assertEqual((self.results(), self.states(installer)), ([20, 80], {"installed"}))
        installer.disable()
        self.assertEqual((self.results(), self.states(installer)), ([2, 8], {"off"}))

    def test_modules_are_imported_by_the_compilation(self) -> None:
        installer = self.waiting(*self.NAMES)
        installer.before_compilation()
        self.assertIn("torchfake.upstream", sys.modules)
        self.assertEqual(self.results(), [20, 80])

    def test_early_seams_come_at_once_and_go_with_the_others(self) -> None:
        early = self.seam("cached", early=True)
        installer = self.waiting(early, *self.NAMES)
        self.assertEqual((self.load().cached(1), self.results()), (30, [2, 8]))
        installer.disable()
        self.assertEqual((self.load().cached(1), self.results()), (3, [2, 8]))
        self.enabled(early, *self.NAMES).disable()
        self.assertEqual((self.load().cached(1), self.results()), (3, [2, 8]))

    def test_a_failure_takes_out_early_seams_too(self) -> None:
        installer = self.waiting(self.seam("cached", early=True), self.seam("", "register_badly", "register"))
        self.raises("bad_registration", installer)
        self.assertEqual(self.load().cached(1), 3)
        installer.before_compilation()
        self.assertEqual(installer.state, "off")

    def test_an_interrupt_leaves_the_next_compilation_to_install(self) -> None:
        self.write("torchfake_ours.py", OURS + "\ndef interrupted(module):\n    raise KeyboardInterrupt\n")
        installer = self.waiting("plain", self.seam("", "interrupted", "register"))
        with self.assertRaises(KeyboardInterrupt):
            installer.before_compilation()
        self.assertEqual((self.load().plain(1), self.states(installer)), (2, {"waiting"}))
        sys.modules["torchfake_ours"].interrupted = sys.modules["torchfake_ours"].register
        installer.before_compilation()
        self.assertEqual(self.load().plain(1), 20)

    def test_a_function_replaced_before_the_moment_and_after_enable(self) -> None:
        installer = self.waiting(*self.NAMES)
        with mock.patch.object(self.load(), "plain", theirs := lambda x: -x):
            self.assertIn("enable()", str(self.raises("source_changed", installer)))
            self.assertIs(self.load().plain, theirs)
        installer.enable()
        with mock.patch.object(self.load(), "plain", lambda x: -x):
            installer.before_compilation()
            self.assertEqual(self.results(), [-1, 80])

    def test_in_the_middle_of_a_compilation(self) -> None:
        """The compilation began without hooks: the overlay is imported in it."""
        installer = self.waiting(*self.NAMES)
        for context in (torch._guards.CompileContext, torch._guards.TracingContext):
            with mock.patch.object(context, "try_get", return_value=context):
                installer.before_compilation()
                self.assertEqual(self.states(installer), {"waiting"})
        installer.before_compilation()
        self.assertEqual(self.states(installer), {"installed"})

    def test_threads_that_begin_to_compile_at_once(self) -> None:
        self.write("torchfake/upstream.py", "import time\ntime.sleep(0.2)\n" + textwrap.dedent(UPSTREAM))
        installer = self.waiting(*self.NAMES)
        start = threading.Barrier(4)

        def compile_here(_: int) -> list[int]:
            start.wait()
            installer.before_compilation()
            return self.results()

        with ThreadPoolExecutor(4) as pool:
            self.assertEqual([*pool.map(compile_here, range(4))], [[20, 80]] * 4)

    def test_another_thread_disables_while_modules_are_imported(self) -> None:
        installer = self.waiting(*self.NAMES)
        self.write("torchfake/upstream.py", "import builtins\nbuiltins.pause()\n" + textwrap.dedent(UPSTREAM))
        with mock.patch("builtins.pause", installer.disable, create=True):
            installer.before_compilation()
        self.assertEqual((self.results(), self.states(installer)), ([2, 8], {"off"}))


@form.overlay_only
class TestWhoeverLoadedTheModules(Moment):
    def setUp(self) -> None:
        super().setUp()
        finders = list(sys.meta_path)
        self.addCleanup(lambda: sys.meta_path.__setitem__(slice(None), finders))

    def load_by_hand(self, path: Path) -> types.ModuleType:
        spec = importlib.util.spec_from_file_location("torchfake.upstream", path)
        module = sys.modules["torchfake.upstream"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def test_finders_of_other_libraries(self) -> None:
        for finder in (Watchdog, functools.partial(Instrumenter, "torchfake")):
            for when in ("before", "after", "at the moment"):
                with self.subTest(finder, when=when):
                    self.forget()
                    if when == "before":
                        install(finder())
                    installer = self.waiting(*self.NAMES)
                    if when != "before":
                        install(finder())
                    if when != "at the moment":
                        self.load()
                    installer.before_compilation()
                    self.assertEqual(self.results(), [20, 80])
                    installer.disable()
                    self.assertEqual(self.results(), [2, 8])
                    del sys.meta_path[0]

    def test_by_hand(self) -> None:
        installer = self.waiting(*self.NAMES)
        self.load_by_hand(self.root / "torchfake" / "upstream.py")
        installer.before_compilation()
        self.assertEqual(self.results(), [20, 80])

    def test_from_another_file(self) -> None:
        """Its source is not the one that was checked."""
        (self.root / "elsewhere.py").write_text(textwrap.dedent(UPSTREAM))
        installer = self.waiting(*self.NAMES)
        module = self.load_by_hand(self.root / "elsewhere.py")
        self.assertIn("elsewhere.py, by SourceFileLoader", str(self.raises("source_changed", installer)))
        self.assertEqual(module.plain(1), 2)
        self.refused("source_changed", self.seam("plain"))


@form.overlay_only
class TestAfter(Moment):
    def test_modules_that_are_loaded_again(self) -> None:
        """Reloaded in place, or imported anew: the next compilation is an error, and enable() installs them again."""

        def anew(module):
            del sys.modules["torchfake.upstream"]
            return self.load()

        for again in (importlib.reload, anew):
            for leave in ("before_compilation", "disable"):
                with self.subTest(again, leave=leave):
                    self.forget()
                    installer = self.enabled(*self.NAMES, self.seam("", "register", "register"))
                    module = again(self.load())
                    own = module.plain
                    self.assertEqual((self.results(), self.states(installer)), ([2, 8], {"taken out"}))
                    if leave == "disable":
                        installer.disable()
                    else:
                        self.assertIn("torchfake.upstream:plain", self.raises("taken_out", installer).target)
                    self.assertEqual((module.plain, module.REGISTERED, self.results()), (own, [], [2, 8]))
                    installer.enable()
                    self.assertEqual((module.REGISTERED, self.results()), (["ours"], [20, 80]))

    def test_a_module_with_nothing_but_a_registration_is_loaded_again(self) -> None:
        installer = self.enabled(self.seam("", "register", "register"))
        importlib.reload(self.load())
        self.raises("taken_out", installer)

    def test_somebody_who_wraps_a_hook_changes_nothing(self) -> None:
        installer = self.enabled(*self.NAMES)
        module = self.load()
        hook = module.plain
        for theirs in (lambda x: hook(x) + 1, functools.wraps(hook)(lambda x: hook(x) + 1)):
            with mock.patch.object(module, "plain", theirs):
                installer.before_compilation()
                self.assertEqual((module.plain(1), self.states(installer)), (21, {"installed"}))

    def test_what_somebody_took_away_is_not_taken_out(self) -> None:
        installer = self.enabled("Thing.method")
        with mock.patch.object(self.load(), "Thing", None):
            installer.before_compilation()
        with mock.patch.dict(sys.modules):
            del sys.modules["torchfake.upstream"]
            installer.before_compilation()
        self.assertEqual(self.states(installer), {"installed"})


# How a compilation may begin, in a process that has compiled nothing.
ROUTES = {
    "torch.compile": "torch.compile(f, backend='eager')(x)",
    "torch._dynamo.optimize": "torch._dynamo.optimize('aot_eager')(f)(x)",
    "inductor": "torch.compile(f)(x)",
    "torch._dynamo.export": "torch._dynamo.export(f)(x)",
    "torch.export": "torch.export.export(Module(), (x,), strict=False)",
    "strict torch.export": "torch.export.export(Module(), (x,), strict=True)",
    "compile_fx": "compile_fx(torch.fx.symbolic_trace(f), [x])(x)",
    "torch._inductor.compile": "torch._inductor.compile(make_fx(f)(x), [x])",
    "torch._inductor.standalone_compile": """
torch._inductor.standalone_compile(make_fx(f)(x), [x], dynamic_shapes='from_example_inputs')""",
    "compile_only": "from torch_overlay.testing import compile_only; compile_only(f, x)",
    "placement_checked": """
from torch_overlay.testing import placement_checked
with placement_checked():
    torch.compile(f)(x)""",
    "compiled autograd": """
with torch._dynamo.compiled_autograd._enable(lambda gm: gm):
    f(x.requires_grad_()).sum().backward()""",
}

ROUTE = """
import inspect, sys, torch, torch._dynamo.compiled_autograd
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx
import torch_overlay
from torch_overlay._engine.install import Installer

change, codes, objects = Installer._change, set(), []

def changing(installer, seams):
    assert not codes, "installed twice"
    frame = sys._getframe()
    while frame is not None:
        codes.add(frame.f_code)
        objects.append(frame.f_locals.get("self"))
        frame = frame.f_back
    change(installer, seams)

Installer._change = changing

def f(x):
    return torch.sin(x) + 1

class Module(torch.nn.Module):
    forward = lambda self, x: f(x)

x = torch.ones(3)
{route}
assert torch_overlay._installer.state == "installed" and codes, "nothing was installed"
changes = [c for c in torch_overlay._installer.changes.values() if c.seam.kind == "wrap" and not c.seam.early]
late = [c.seam.target for c in changes if inspect.unwrap(c.place.original).__code__ in codes]
# The first compiled backward of all has no graph of a forward in it, and so nothing to place on streams.
late += [c.seam.target for c in changes if c.seam.methods and any(type(o) is c.place.owner for o in objects)
         and c.place.owner.__name__ != "AutogradCompilerInstance"]
assert not late, late
"""


@form.overlay_only
class TestCompilation(unittest.TestCase):
    def succeeds(self, code: str, run=form.fork_python) -> str:
        result = run(code)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def test_every_route_has_all_hooks_before_a_function_with_a_seam_is_called(self) -> None:
        for name, route in ROUTES.items():
            with self.subTest(name):
                self.succeeds(ROUTE.format(route=route))

    def test_imports_of_compiler_modules_begin_no_compilation(self) -> None:
        self.succeeds(ROUTE.partition("x = ")[0] + "assert torch_overlay._installer.state == 'waiting'")

    def test_an_error_at_the_moment_is_that_of_the_compilation_and_the_next_one_is_stock(self) -> None:
        self.succeeds("""
import torch, torch_overlay, torch._inductor.codecache as c
c.FxGraphHashDetails.__init__ = lambda *_: None
f = torch.compile(lambda x: x + 1, backend="eager")
try:
    f(torch.ones(1))
except torch_overlay.OverlayError as error:
    assert error.reason == "source_changed", error
else:
    raise SystemExit("no error")
assert not torch_overlay.status().enabled and "source_changed" in torch_overlay.status().why
assert f(torch.ones(1)).item() == 2
""")

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
assert status.enabled and {{s.state for s in status.seams}} == {{"installed"}}, status
print(result.graph_breaks, result.plans[0].table())
"""

    @form.slow
    def test_with_import_hooks_a_program_compiles_to_the_same(self) -> None:
        folder = str(Path(__file__).resolve().parent)
        plain, *others = (
            self.succeeds(self.PROGRAM.format(first=first, folder=folder), form.run_python)
            for first in (
                "import torch_overlay",
                "install(Watchdog()); import torch_overlay",
                "import torch_overlay; install(Instrumenter('torch')); install(Watchdog())",
            )
        )
        self.assertTrue(plain.startswith("[] ") and "wait" in plain, plain)
        self.assertEqual(others, [plain] * 2)
