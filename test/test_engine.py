"""The overlay engine: what it refuses and how, what it survives, what it costs.

Faults are staged on a small package made for the purpose, whose name starts with "torch" because seams insist on it;
what concerns the real table runs in fresh interpreters.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import form
from fake_upstream import FakeUpstream, HOLDER, OURS, UPSTREAM
from printed import printed


if not form.PATCHED:
    from torch_overlay.__main__ import main
    from torch_overlay._cli import commands, demo, screen
    from torch_overlay._cli.commands import COMMANDS, STATUSES
    from torch_overlay._engine import verify
    from torch_overlay._engine.install import forget_after_import, is_importing
    from torch_overlay._engine.report import make_status
    from torch_overlay.errors import OverlayError, REASONS
    from torch_overlay.seams import fingerprint, Seam


MADE = """
class Made:
    def __init__(self, value):
        self.value = value

    def twice(self, x):
        return 2 * x
"""

OVERRIDES = """
from torch_overlay.hooks import override

def made(original, made, value):
    override(made, twice=times_ten)
    original(made, value)
"""


@form.overlay_only
class TestKinds(FakeUpstream):
    NAMES = ("plain", "cached", "Thing.static", "Thing.of_class", "Thing.method")

    def results(self, module) -> list:
        thing = module.Thing()
        return [
            module.plain(1),
            module.cached(1),
            thing.static(1),
            module.Child.static(1),
            thing.of_class(1),
            module.Child.of_class(1),
            thing.method(1),
        ]

    WITHOUT = [2, 3, 5, 5, ("Thing", 1), ("Child", 1), 8]
    WITH = [20, 30, 50, 50, ("Thing", 1) * 10, ("Child", 1) * 10, 80]

    def test_wrap_every_kind_of_function_of_a_loaded_module(self) -> None:
        module = self.load()
        before = {owner: dict(vars(owner)) for owner in (module.Thing, module.Child)}
        installer = self.installer(*map(self.seam, self.NAMES))
        self.assertEqual(self.results(module), self.WITHOUT)
        installer.enable()
        self.assertEqual(self.results(module), self.WITH)
        installer.disable()
        self.assertEqual(self.results(module), self.WITHOUT)
        self.assertEqual(before, {owner: dict(vars(owner)) for owner in (module.Thing, module.Child)})

    def test_a_property_is_refused(self) -> None:
        for name in ("Thing.prop", "Thing.once"):
            self.assertIn(name, self.refused("source_changed", self.seam(name)).target)

    def test_wrap_a_context_manager(self) -> None:
        module = self.load()
        self.installer(self.seam("managed", "pass_on")).enable()
        with module.managed() as value:
            self.assertEqual(value, 3)
        self.assertEqual(sys.modules["torchfake_ours"].CALLS, ["managed"])

    def test_register(self) -> None:
        installer = self.enabled(self.seam("", "register", "register"))
        module = self.load()
        self.assertEqual(module.REGISTERED, ["ours"])
        installer.disable()
        self.assertEqual(module.REGISTERED, [])

    def test_changes_are_undone_in_reverse(self) -> None:
        text = "\ndef register_{0}(module):\n    CALLS.append('{0}')\n    return lambda: CALLS.append('not {0}')\n"
        self.write("torchfake_ours.py", OURS + text.format("first") + text.format("second"))
        self.load("holder")
        seams = [
            Seam(f"torchfake.{module}:", f"torchfake_ours:register_{which}", "register", None, "", "a test")
            for module, which in (("upstream", "first"), ("holder", "second"))
        ]
        installer = self.enabled(*seams)
        installer.disable()
        self.assertEqual(sys.modules["torchfake_ours"].CALLS, ["first", "second", "not second", "not first"])

    def test_modules_that_imported_a_function_by_name(self) -> None:
        """Before the hooks were installed, or since then."""
        upstream, holder = self.load(), self.load("holder")
        installer = self.enabled("plain")
        self.write("torchfake/late.py", HOLDER)
        late = self.load("late")
        places = [upstream.plain, holder.plain, holder.other_name, late.plain, late.other_name]
        self.assertEqual([place(1) for place in places], [20] * 5)
        installer.disable()
        places = [upstream.plain, holder.plain, holder.other_name, late.plain, late.other_name]
        self.assertEqual({id(place) for place in places}, {id(upstream.plain)})
        self.assertEqual(upstream.plain(1), 2)

    def test_variables_of_the_program_itself_stay(self) -> None:
        """Outside of torch, what a module imported by its name is replaced, as by a patched torch; another is not."""
        upstream = self.load()
        plain, method = upstream.plain, upstream.Thing.method
        program = types.ModuleType("a_program")
        program.plain, program.saved, program.method, program.kept = plain, plain, method, [method]
        for name, saved in (("a_program", 2), ("__main__", 2), ("torchfake.other", 20), ("torch_overlay.ours", 20)):
            with self.subTest(name), mock.patch.dict(sys.modules, {name: program}):
                installer = self.enabled("plain", "Thing.method")
                self.assertEqual((program.plain(1), program.saved(1)), (20, saved))
                hook = program.hook = upstream.plain
                installer.disable()
                self.assertEqual((program.plain, program.saved), (plain, plain))
                self.assertEqual(program.hook, hook if saved == 2 else plain)
                self.assertEqual((program.method, program.kept), (method, [method]))

    def test_a_package_is_forgotten_at_the_next_import_of_another(self) -> None:
        finders = list(sys.meta_path)
        package, holder = importlib.import_module("torchfake"), self.load("holder")
        forget_after_import("torchfake")
        self.write("torchfake/late.py", "")
        self.load("late")
        self.assertIs(sys.modules["torchfake"], package)
        importlib.import_module("torchfake_ours")
        self.assertNotIn("torchfake", sys.modules)
        self.assertEqual(sys.meta_path, finders)
        self.assertIsNot(self.load("holder"), holder)


@form.overlay_only
class TestRefusals(FakeUpstream):
    def test_wrong_version(self) -> None:
        with mock.patch.dict(verify.base(), torch="1.0.0"):
            error = self.refused("wrong_version", self.seam("plain"))
        self.assertIn("torch 1.0.0", error.expected)
        self.assertIn(verify.found_version(), error.found)
        self.assertIn("1.0.0", str(error))

    def test_build_without_cuda(self) -> None:
        torch = sys.modules["torch"]
        with mock.patch.object(torch.version, "cuda", None):
            error = self.refused("wrong_version", self.seam("plain"))
        self.assertIn("built with CUDA", error.expected)
        self.assertIn(f"torch {torch.__version__} without CUDA", str(error))

    def test_already_patched(self) -> None:
        (self.root / "torch" / "_overlay").mkdir(parents=True)
        self.assertIn("--reverse", str(self.refused("already_patched", self.seam("plain"))))

    def test_a_definition_that_changed_on_disk(self) -> None:
        self.write("torchfake/upstream.py", UPSTREAM.replace("x + 1", "x + 11"))
        for loaded in (False, True):
            with self.subTest(loaded=loaded):
                if loaded:
                    self.load()
                error = self.refused("source_changed", self.seam("cached"), self.seam("plain"))
                self.assertEqual(error.target, "torchfake.upstream:plain")
                self.assertIn(self.seam("plain").fingerprint, error.expected)

    def test_a_method_that_is_overridden_changed_on_disk_or_was_replaced_in_memory(self) -> None:
        seam = self.override_methods()
        module = self.load()
        with mock.patch.object(module.Made, "twice", lambda self, x: x):
            error = self.refused("source_changed", self.seam("plain"), seam)
            self.assertEqual(error.target, "torchfake.upstream:Made.twice")
        self.installer(seam).enable()
        self.forget()
        self.write("torchfake/upstream.py", UPSTREAM + MADE.replace("2 * x", "x + x"))
        self.refused("source_changed", self.seam("plain"), seam)

    def override_methods(self) -> Seam:
        self.write("torchfake/upstream.py", UPSTREAM + MADE)
        self.write("torchfake_ours.py", OURS + OVERRIDES)
        mark = fingerprint(MADE, "Made.__init__", "Made.twice")
        target = "torchfake.upstream:Made.__init__"
        return Seam(target, "torchfake_ours:made", "wrap", None, mark, "a test", methods=("twice",))

    def test_methods_are_overridden_in_what_a_constructor_makes(self) -> None:
        """Also in a library's subclass, whoever made it; a method that a library has replaced is called."""
        installer = self.installer(self.override_methods())
        module = self.load()
        made_before, subclass = module.Made(1), type("Subclass", (module.Made,), {"twice": lambda self, x: -x})
        installer.enable()
        made, of_library = module.Made(2), subclass(3)
        self.assertEqual((made_before.twice(1), made.twice(1), of_library.twice(1)), (2, 20, -10))
        self.assertEqual((type(made).__name__, isinstance(made, module.Made), made.value), ("Made", True, 2))
        self.assertIs(type(type(made)(4)), type(made))
        with mock.patch.object(module.Made, "twice", lambda self, x: x + 6):
            self.assertEqual(made.twice(1), 70)
        installer.disable()
        self.assertEqual((type(module.Made(5)), module.Made(5).twice(1)), (module.Made, 2))

    def functions(self) -> Seam:
        """A seam of two functions of the module, one in a class."""
        hook = "def {}(original, *args):\n    return original(*args) * 10\n"
        self.write("torchfake_hooks.py", hook.format("plain") + hook.format("method"))
        self.addCleanup(sys.modules.pop, "torchfake_hooks", None)
        names = ("plain", "Thing.method")
        mark = fingerprint(textwrap.dedent(UPSTREAM), *names)
        return Seam("torchfake.upstream:", "torchfake_hooks", "module", None, mark, "a test", methods=names)

    def test_functions_of_a_module_are_hooked_together(self) -> None:
        installer = self.installer(seam := self.functions())
        holder, thing = self.load("holder"), self.load().Thing()
        installer.enable()
        self.assertEqual((self.load().plain(1), holder.plain(1), thing.method(1), thing.static(1)), (20, 20, 80, 5))
        self.assertEqual([(s.seam, s.state) for s in make_status(installer).seams], [(seam, "installed")])
        self.load().Thing.method = self.load().Thing.method.__wrapped__
        self.assertEqual([s.state for s in make_status(installer).seams], ["taken out"])
        installer.disable()
        self.assertEqual((self.load().plain(1), holder.plain(1), thing.method(1)), (2, 2, 8))

    def test_a_change_of_any_function_of_a_module_is_refused(self) -> None:
        seam = self.functions()
        module = self.load()
        for owner, name, target in ((module, "plain", "plain"), (module.Thing, "method", "Thing.method")):
            with mock.patch.object(owner, name, lambda *args: 0):
                error = self.refused("source_changed", self.seam("cached"), seam)
                self.assertEqual(error.target, f"torchfake.upstream:{target}")
        for found in ("x + 1", "x + 7"):
            self.forget()
            self.write("torchfake/upstream.py", UPSTREAM.replace(found, f"{found} + 0"))
            self.assertEqual(self.refused("source_changed", self.seam("cached"), seam).target, seam.target)
        self.forget()
        self.write("torchfake/upstream.py", UPSTREAM.replace("def method", "def renamed").replace("(method)", "(0)"))
        self.assertIn("Thing.method", str(self.refused("missing_target", self.seam("cached"), seam)))

    def test_a_decorator_that_changed_on_disk(self) -> None:
        self.write("torchfake/upstream.py", UPSTREAM.replace("lru_cache(None)", "lru_cache(8)"))
        self.refused("source_changed", self.seam("plain"), self.seam("cached"))

    def test_an_edit_elsewhere_in_the_file_is_no_harm(self) -> None:
        self.write("torchfake/upstream.py", "# edited\n" + textwrap.dedent(UPSTREAM))
        installer = self.enabled("plain")
        self.assertEqual(self.load().plain(1), 20)
        self.assertEqual(installer.edited_files, ["torchfake/upstream.py"])

    def test_a_definition_that_is_gone(self) -> None:
        self.write("torchfake/upstream.py", UPSTREAM.replace("def plain", "def renamed"))
        self.refused("missing_target", self.seam("cached"), self.seam("plain"))

    def test_a_file_that_is_no_python(self) -> None:
        self.write("torchfake/upstream.py", UPSTREAM.replace("def plain", "deff plain"))
        self.assertIn("none in the source file", str(self.refused("missing_target", self.seam("plain"))))

    def test_a_file_that_is_gone(self) -> None:
        (self.root / "torchfake" / "upstream.py").unlink()
        self.refused("missing_target", self.seam("plain"))

    def test_a_module_of_another_file_or_of_one_that_is_gone(self) -> None:
        module = self.load()
        for file in (__file__, str(self.root / "archive.zip" / "upstream.py"), None):
            with self.subTest(file=file), mock.patch.object(module, "__file__", file):
                self.assertIn(f"one from {file}", self.refused("source_changed", self.seam("plain")).found)

    def test_a_method_that_moved_to_a_base_class(self) -> None:
        self.load()
        seam = Seam("torchfake.upstream:Child.method", "torchfake_ours:times_ten", "wrap", None, "0" * 16, "a test")
        with mock.patch.object(verify, "check_files", return_value=[]):
            self.refused("missing_target", self.seam("plain"), seam)

    def test_a_function_that_another_library_replaced_in_memory(self) -> None:
        module = self.load()

        @functools.wraps(module.plain)
        def theirs(x):
            return -x

        class Proxy:
            """Says that it is what it stands for."""

            def __init__(self, wrapped) -> None:
                self.__dict__.update(__wrapped__=wrapped, __code__=wrapped.__code__)

            __class__ = property(lambda self: type(self.__wrapped__))  # type: ignore[assignment]

            def __call__(self, x):
                return -x

        proxy = Proxy(module.plain)
        self.assertIsInstance(proxy, types.FunctionType)
        for theirs_or_other in (theirs, proxy, module.managed, len, None):
            with self.subTest(repr(theirs_or_other)):
                with mock.patch.object(module, "plain", theirs_or_other):
                    error = self.refused("source_changed", self.seam("cached"), self.seam("plain"))
                self.assertIn("in memory", str(error))

    def test_a_function_replaced_in_memory_while_its_module_is_imported(self) -> None:
        self.write("torchfake/upstream.py", textwrap.dedent(UPSTREAM) + "plain = lambda x: -x\n")
        with mock.patch.object(verify, "check_files", return_value=[]):
            self.refused("source_changed", self.seam("cached"), self.seam("plain"))
        self.assertEqual((self.load().cached(1), self.load().plain(1)), (3, -1))

    def test_a_module_that_cannot_be_imported(self) -> None:
        self.write("torchfake/upstream.py", "1 / 0\n" + textwrap.dedent(UPSTREAM))
        error = self.refused("import_failed", self.seam("plain"))
        self.assertEqual((error.target, error.found), ("torchfake.upstream", "ZeroDivisionError('division by zero')"))
        self.write("torchfake/upstream.py", UPSTREAM)
        importlib.invalidate_caches()
        self.enabled("plain")
        self.assertEqual(self.load().plain(1), 20)

    def test_a_second_copy_of_the_overlay(self) -> None:
        self.load()
        self.enabled("plain")
        second = self.installer(self.seam("plain"))
        with self.assertRaises(OverlayError) as caught:
            second.enable()
        self.assertEqual(caught.exception.reason, "installed_twice")

    def test_a_registration_that_fails_is_rolled_back_with_everything_else(self) -> None:
        self.load()
        with self.assertRaises(ZeroDivisionError):
            self.enabled("plain", self.seam("", "register_and_fail", "register"))
        self.assertEqual(self.load().plain(1), 2)
        self.refused("bad_registration", self.seam("plain"), self.seam("", "register_badly", "register"))

    def test_an_implementation_that_does_not_exist(self) -> None:
        self.load()
        with self.assertRaises(AttributeError):
            self.installer(self.seam("plain"), self.seam("", "nothing", "register")).enable()
        self.assertEqual(self.load().plain(1), 2)

    def test_disable_when_somebody_wrapped_our_hook(self) -> None:
        module = self.load()
        installer = self.enabled("plain", "cached")
        with mock.patch.object(module, "plain", lambda x: -x):
            with self.assertRaises(OverlayError) as caught:
                installer.disable()
            self.assertEqual(caught.exception.reason, "wrapped_over")
            self.assertTrue(installer.enabled)
            self.assertEqual(module.cached(1), 30)
        installer.disable()
        self.assertEqual((module.plain(1), module.cached(1)), (2, 3))

    def test_somebody_puts_back_what_was_there_before_the_hook(self) -> None:
        """The next compilation is an error that names each place, and all other hooks are gone; so they are after
        disable(). One function, another function from the same source, or all of a module.
        """
        names = ("plain", "cached", "Thing.static", "Thing.of_class", "Thing.method")
        seams = [self.seam(name) for name in names]
        module = self.load()
        owners = (module, module.Thing, module.Child)
        before = [dict(vars(owner)) for owner in owners]
        saved = {s.qualname: verify.find_place(s, module) for s in seams}
        copy = types.FunctionType(module.Thing.method.__code__, vars(module))
        cases = [*({name: saved[name].raw} for name in saved), {"Thing.method": copy}]
        cases.append({name: place.raw for name, place in saved.items()})
        for case in cases:
            for leave in ("before_compilation", "disable"):
                with self.subTest(case, leave=leave):
                    installer = self.enabled(*seams)
                    for name, value in case.items():
                        setattr(saved[name].owner, saved[name].name, value)
                    if leave == "disable":
                        installer.disable()
                    else:
                        with self.assertRaises(OverlayError) as caught:
                            installer.before_compilation()
                        self.assertEqual(caught.exception.reason, "taken_out")
                        targets = {f"torchfake.upstream:{name}" for name in case}
                        self.assertEqual(set(caught.exception.target.split(", ")), targets)
                        self.assertIn("torch_overlay is disabled. ", str(caught.exception))
                        self.assertIn("taken_out", installer.off_because)
                    self.assertFalse(installer.enabled)
                    self.assertEqual([dict(vars(owner)) for owner in owners], before)
                    installer.enable()
                    self.assertEqual((module.plain(1), module.Thing().method(1)), (20, 80))
                    installer.disable()

    def test_enabling_from_a_module_that_the_target_is_importing(self) -> None:
        self.write("torchfake/upstream.py", "import torchfake.enabler\n" + textwrap.dedent(UPSTREAM))
        self.write("torchfake/enabler.py", "import builtins\nbuiltins.enable_now()\n")
        enable_now = functools.partial(self.refused, "torch_is_importing", self.seam("plain"))
        with mock.patch("builtins.enable_now", enable_now, create=True):
            self.load()

    def test_the_error_says_what_where_and_what_to_do(self) -> None:
        error = OverlayError("source_changed", "torch.a:b", "this", "that", "Do something.")
        for part in ("source_changed", "torch.a:b", "this", "that", "Do something.", REASONS["source_changed"]):
            self.assertIn(part, str(error))
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((again.reason, str(again)), (error.reason, str(error)))

    def test_a_seam_that_makes_no_sense_cannot_be_written(self) -> None:
        for target, kind, mark in (
            ("numpy:add", "wrap", "0"),
            ("torch.a", "wrap", "0"),
            ("torch.a:", "wrap", "0"),
            ("torch.a:b", "register", ""),
            ("torch.a:b", "wrap", ""),
            ("torch.a:", "register", "0"),
        ):
            with self.subTest(target=target, kind=kind), self.assertRaises(ValueError):
                Seam(target, "a:b", kind, None, mark, "a test")
        for impl, methods in (("a", ()), ("a", ("b",)), ("a:b", ("b", "c"))):
            with self.subTest(impl=impl, methods=methods), self.assertRaises(ValueError):
                Seam("torch.a:", impl, "module", None, "0", "a test", methods=methods)


@form.overlay_only
class TestThreads(FakeUpstream):
    def test_threads_that_enable_and_disable_at_once(self) -> None:
        module = self.load()
        original = module.plain
        installer = self.installer(self.seam("plain"), self.seam("cached"))
        start = threading.Barrier(3)

        def work(_: int) -> None:
            start.wait()
            for _ in range(25):
                installer.enable()
                installer.disable()

        with ThreadPoolExecutor(3) as pool:
            self.assertEqual([*pool.map(work, range(3))], [None] * 3)
        self.assertIs(module.plain, original)
        installer.enable()
        self.assertEqual(module.plain(1), 20)

    def test_threads_that_take_fingerprints_at_once(self) -> None:
        """CPython 3.11 ends in a SystemError when two threads build syntax trees at once and one is interrupted."""

        class Interrupts:
            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                time.sleep(0)

        def work(number: int) -> list[str]:
            marks = []
            for turn in range(30):
                for _ in range(10):
                    Interrupts()
                marks.append(fingerprint(f"{source}\n# {number}, {turn}\n", "plain"))
            return marks

        source = textwrap.dedent(UPSTREAM) * 20
        thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
        self.addCleanup(gc.set_threshold, *thresholds)
        self.addCleanup(sys.setswitchinterval, interval)
        gc.set_threshold(50)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(3) as pool:
            marks = {mark for found in pool.map(work, range(3)) for mark in found}
        self.assertEqual(marks, {fingerprint(source, "plain")})

    def test_a_module_that_another_thread_is_importing_when_we_enable(self) -> None:
        self.write("torchfake/upstream.py", "import builtins\nbuiltins.pause()\n" + textwrap.dedent(UPSTREAM))
        entered, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            entered.set()
            go_on.wait(10)

        with mock.patch("builtins.pause", pause, create=True):
            loading = threading.Thread(target=self.load)
            loading.start()
            entered.wait(10)
            installer = self.installer(self.seam("plain"))
            enabling = threading.Thread(target=installer.enable)
            enabling.start()
            enabling.join(0.2)
            self.assertTrue(enabling.is_alive())
            go_on.set()
            enabling.join(10)
            loading.join(10)
        self.assertTrue(installer.enabled)
        self.assertEqual(self.load().plain(1), 20)

    def test_import_in_another_thread_that_waits_for_us(self) -> None:
        self.write("torchfake/upstream.py", "import torchfake.other\n" + textwrap.dedent(UPSTREAM))
        self.write("torchfake/other.py", "import builtins\nbuiltins.enable_now()\n")
        entered, errors = threading.Event(), []

        def enable_now() -> None:
            """Runs in the import of `other`, for which the other thread's import of `upstream` waits."""
            loading.start()
            while not is_importing(sys.modules.get("torchfake.upstream")):
                entered.wait(0.01)
            entered.wait(0.2)
            try:
                self.enabled("plain")
            except OverlayError as error:
                errors.append(error)

        loading = threading.Thread(target=self.load)
        with mock.patch("builtins.enable_now", enable_now, create=True):
            self.load("other")
        loading.join(10)
        self.assertEqual([error.reason for error in errors], ["torch_is_importing"])
        self.assertEqual(self.load().plain(1), 2)


@form.overlay_only
class TestProcesses(unittest.TestCase):
    def run_ok(self, code: str, *options: str, run: Any = form.fork_python, **env: str) -> str:
        result = run(code, *options, env=env)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout + result.stderr

    @form.slow
    def test_importing_twice(self) -> None:
        self.run_ok("""
import torch_overlay, importlib, torch._inductor.codecache as c
torch_overlay.enable()
kept = [c.FxGraphHashDetails.__init__]
import torch_overlay
importlib.reload(torch_overlay)
assert c.FxGraphHashDetails.__init__ is kept[0] and torch_overlay.status().enabled
torch_overlay.disable()
assert c.FxGraphHashDetails.__init__ is kept[0].__wrapped__
""")

    @form.slow
    def test_python_with_optimization(self) -> None:
        self.run_ok(
            """
import torch_overlay, torch._inductor.codecache as c
torch_overlay.enable()
if not torch_overlay.status().enabled or "__overlay__" not in vars(c.FxGraphHashDetails.__init__):
    raise SystemExit("not installed")
torch_overlay.disable()
if "__overlay__" in vars(c.FxGraphHashDetails.__init__):
    raise SystemExit("still installed")
""",
            "-O",
            run=form.run_python,
        )

    def test_environment_variable_that_disables(self) -> None:
        output = self.run_ok(
            """
import torch_overlay, torch._inductor.codecache as c
assert "__overlay__" not in vars(c.FxGraphHashDetails.__init__)
torch_overlay.enable()
assert "__overlay__" not in vars(c.FxGraphHashDetails.__init__)
torch_overlay.disable()
assert torch_overlay.config.streams
print(torch_overlay.status())
""",
            TORCH_OVERLAY_DISABLE="1",
        )
        self.assertIn("not enabled (TORCH_OVERLAY_DISABLE=1 is set", output)

    def test_a_forked_child_inherits_the_state_and_may_change_it(self) -> None:
        output = self.run_ok("""
import os, torch, torch_overlay, torch._inductor.codecache as c
hooked = lambda: "__overlay__" in vars(c.FxGraphHashDetails.__init__)
pid = os.fork()
if pid == 0:
    assert torch_overlay.status().enabled and not hooked()
    torch._guards.CompileContext(None)
    os._exit(0 if hooked() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert not hooked()
torch_overlay.enable()
pid = os.fork()
if pid == 0:
    assert hooked() and torch_overlay.status().enabled
    torch_overlay.disable()
    assert not hooked()
    torch_overlay.enable()
    os._exit(0 if hooked() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert hooked()
print("parent done")
""")
        self.assertIn("parent done", output)

    @form.slow
    def test_fork_while_another_thread_installs(self) -> None:
        self.run_ok("""
import os, threading, torch_overlay, torch._inductor.codecache as c
stop = threading.Event()
def toggle():
    while not stop.is_set():
        torch_overlay.disable(); torch_overlay.enable()
thread = threading.Thread(target=toggle); thread.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        torch_overlay.enable()
        ok = "__overlay__" in vars(c.FxGraphHashDetails.__init__)
        torch_overlay.disable()
        os._exit(0 if ok and "__overlay__" not in vars(c.FxGraphHashDetails.__init__) else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set(); thread.join()
""")

    @form.slow
    def test_a_spawned_child_has_what_its_main_module_imports(self) -> None:
        script = """
import multiprocessing, sys
{imports}
def child(queue):
    import torch._inductor.codecache as c
    c.torch._guards.CompileContext(None)
    queue.put("__overlay__" in vars(c.FxGraphHashDetails.__init__))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start(); print(queue.get(timeout=100)); process.join()
"""
        for imports, expected in (("import torch_overlay", "True"), ("import torch", "False")):
            with self.subTest(imports), tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "main.py"
                path.write_text(script.format(imports=imports))
                env = {**os.environ, "PYTHONPATH": str(form.ROOT)}
                result = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)
                self.assertEqual(result.stdout.strip(), expected, result.stderr)

    @form.slow
    def test_enabling_and_disabling_after_something_was_compiled(self) -> None:
        output = self.run_ok("""
import torch
f = torch.compile(lambda x: x + 1, backend="eager")
f(torch.ones(1))
import torch_overlay
print("--- enabled", flush=True)
torch._dynamo.reset()
torch_overlay.disable()
torch_overlay.enable()
""")
        self.assertEqual(output.count("had compiled 1 frame(s)"), 1, output)
        self.assertIn("keeps upstream's behaviour until torch._dynamo.reset()", output)

    def test_import_is_cheap_and_leaves_cuda_and_the_compiler_alone(self) -> None:
        """In time of the processor: the machine may be busy."""
        code = """
import sys, time, torch, torch._inductor
before = set(sys.modules)
start = time.process_time()
import torch_overlay
print((time.process_time() - start) * 1e3)
assert not torch.cuda.is_initialized()
new = [name for name in set(sys.modules) - before if name.startswith("torch.")]
assert not new, new
"""
        self.assertLess(float(self.run_ok(code, run=form.run_python)), 300)

    def test_import_before_torch(self) -> None:
        code = """
import torch_overlay, sys
assert "torch._inductor" not in sys.modules and torch_overlay.status().enabled
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""
        self.run_ok(code, run=form.run_python)

    def test_a_failed_import_says_why_and_can_be_repeated(self) -> None:
        self.run_ok("""
import torch
installed, torch.__version__ = torch.__version__, "2.14.0"
for _ in range(2):
    try:
        import torch_overlay
    except RuntimeError as error:
        assert error.reason == "wrong_version" and "2.14.0" in str(error), error
    else:
        raise SystemExit("imported")
torch.__version__ = installed
import torch_overlay
assert torch_overlay.status().enabled
""")


@form.overlay_only
class TestLogging(unittest.TestCase):
    CODE = """
import logging, torch
import torch_overlay
log = logging.getLogger("torch_overlay._inductor.anything")
log.debug("a debug line"); log.info("an info line"); log.warning("a warning line")
assert torch_overlay.status().enabled
"""

    def output(self, code: str, **env: str) -> str:
        result = (form.run_python if env else form.fork_python)(code, env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stderr

    def test_without_torch_logs_only_warnings_are_printed_and_in_torchs_format(self) -> None:
        lines = self.output(self.CODE).strip().splitlines()
        self.assertEqual(len(lines), 1, lines)
        self.assertRegex(lines[0], r"^W\d{4} .*\] a warning line$")

    @form.slow
    def test_torch_logs(self) -> None:
        for setting, expected in (
            ("dynamo,torch_overlay", ["an info line", "a warning line"]),
            ("+torch_overlay", ["a debug line", "an info line", "a warning line"]),
            ("-torch_overlay", []),
        ):
            with self.subTest(setting):
                self.assertEqual(self.lines(self.CODE, setting), expected)

    @form.slow
    def test_torch_logs_when_the_overlay_is_imported_before_torch(self) -> None:
        code = "import torch_overlay\n" + self.CODE
        self.assertEqual(self.lines(code, "torch_overlay"), ["an info line", "a warning line"])

    def lines(self, code: str, setting: str) -> list[str]:
        text = self.output(code, TORCH_LOGS=setting)
        return [line.partition("] ")[2] for line in text.splitlines() if " line" in line]

    @form.slow
    def test_torch_logs_does_not_enable_the_overlay(self) -> None:
        self.output(
            "import sys, torch\nassert 'torch_overlay' not in sys.modules\n"
            "assert not any(type(finder).__name__ == 'Forget' for finder in sys.meta_path)",
            TORCH_LOGS="torch_overlay",
        )

    def test_set_logs(self) -> None:
        code = self.CODE.replace("log = ", "torch._logging.set_logs(modules={'torch_overlay': logging.INFO})\nlog = ")
        self.assertEqual(self.output(code).count(" line"), 2)


EXITS = """
    import torch

    side = torch.cuda.Stream()

    def f(x):
        return x.sin() + 1

    def branches(x):
        return torch.cond(x.sum() > 0, lambda a: a * 2, torch.rand_like, (x.sin(),)).cos()

    def races(x):
        with torch.cuda.stream(side):
            a = x * 2
        torch._dynamo.graph_break()
        return a + 1

    def fails(x):
        raise KeyError("model")

    def stops(x):
        raise KeyboardInterrupt

    def example_inputs():
        return torch.randn(8, device="cuda")
"""


@form.overlay_only
class TestCommandLine(unittest.TestCase):
    def here(self, *arguments: str) -> tuple[int, str, str]:
        """The same, in this process."""
        return printed(main, list(arguments))

    def test_status_begins_with_the_machine_and_counts_seams(self) -> None:
        from torch_overlay.seam_table import SEAMS

        status, out, _ = self.here("status")
        self.assertEqual(status, 0)
        words = ("GPU", "driver", "C compiler", verify.base()["torch"], "fold_branches_below_us")
        found = [out.index(word) for word in (*words, "Seams", "enabled")]
        self.assertEqual(found, sorted(found))
        self.assertNotIn(SEAMS[0].target, out)

    def test_status_lists_seams_and_is_data(self) -> None:
        from torch_overlay.seam_table import SEAMS

        with mock.patch.dict("os.environ", COLUMNS="200"):
            _, out, _ = self.here("status", "--seams")
        found = json.loads(self.here("status", "--json")[1])
        for seam in SEAMS:
            self.assertIn(seam.target, out)
        self.assertEqual([state["seam"]["target"] for state in found["seams"]], [seam.target for seam in SEAMS])
        self.assertEqual({o["name"]: o["value"] for o in found["features"]}["cudagraphs"], "relaunch")
        self.assertIn("C compiler", found["machine"])

    def test_every_option_is_a_feature(self) -> None:
        features = {feature.name for feature in form.overlay.status().features}
        options = {name for name in form.overlay.config._config if name[0].islower()}  # TYPE_CHECKING counts as one
        self.assertEqual(features, options)

    def test_status_says_who_switched_a_feature_off(self) -> None:
        result = form.fork_command("status", env={"TORCH_OVERLAY_STREAMS": "0", "COLUMNS": "200"})
        self.assertIn("TORCH_OVERLAY_STREAMS is set in the environment", result.stdout)
        self.assertRegex(result.stdout, r"streams\W+False")

    def test_commands_when_disabled_by_the_environment(self) -> None:
        code = "from torch_overlay.__main__ import main\n"
        code += f"for command in ['status'], ['check', {__file__ + ':f'!r}], ['explain', {__file__ + ':none'!r}]:"
        code += "    print('status', main(command))"
        result = form.fork_python(code, env={"TORCH_OVERLAY_DISABLE": "1"})
        self.assertRegex(result.stdout, "(?s)TORCH_OVERLAY_DISABLE=1.*status 0\nstatus 2\nstatus 2\n$")
        for what in ("check: needs the overlay, ", "explain: this is stock PyTorch, "):
            self.assertRegex(result.stderr, rf"(?m)^{what}.*: TORCH_OVERLAY_DISABLE=1 is set .*$")

    @form.slow
    def test_a_package_that_is_not_whole_is_one_clear_error(self) -> None:
        """base.json is missing or broken, or the package is in an archive."""
        with tempfile.TemporaryDirectory() as name:
            package = Path(name, "torch_overlay")
            shutil.copytree(form.ROOT / "torch_overlay", package, ignore=shutil.ignore_patterns("__pycache__"))
            archive = shutil.make_archive(str(Path(name, "package")), "zip", name, "torch_overlay")
            for text in (None, "", "[]"):
                (package / "base.json").unlink() if text is None else (package / "base.json").write_text(text)
                self.is_refused(name, "broken_package", "Install the package again")
            self.is_refused(archive, "broken_package", "archive: unpack it")

    def is_refused(self, path: str, reason: str, remedy: str) -> None:
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-m", "torch_overlay", "status"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
        self.assertEqual(result.returncode, 2)
        self.assertNotIn("Traceback", result.stderr)
        self.assertIn(f"[{reason}]", result.stderr)
        self.assertIn(remedy, result.stderr)

    def test_status_on_a_torch_that_is_refused(self) -> None:
        result = form.fork_command("status", first="import torch; torch.__version__ = '9.9.9'")
        self.assertEqual((result.returncode, result.stderr), (1, ""))
        for word in ("not enabled", "wrong_version", "9.9.9"):
            self.assertIn(word, result.stdout)

    def test_help_and_unknown_commands(self) -> None:
        for arguments, words in (
            ([], "\n    explain "),
            (["--help"], "\n    explain "),
            (["--version"], f"torch_overlay {form.overlay.__version__}\n"),
            *(([command, "--help"], "--json") for command in COMMANDS),
        ):
            status, out, errors = self.here(*arguments)
            self.assertEqual((status, errors), (0, ""))
            self.assertIn(words, out)
        for arguments, why in (
            (["nonsense"], "torch_overlay: argument COMMAND: invalid choice: 'nonsense'"),
            (["status", "all"], "status: no option or argument all (`python -m torch_overlay status --help`)\n"),
            (["doctor", f"{__file__}:f", "--steps", "8"], "doctor: no option or argument --steps 8 "),
            (["timeline", "--sim", __file__], "timeline: no option or argument --sim "),
        ):
            status, out, errors = self.here(*arguments)
            self.assertEqual((status, out), (2, ""))
            self.assertIn(why, errors)

    def test_shared_options_have_one_meaning(self) -> None:
        """Also the exit statuses, in the help and in the documentation."""
        (whole,) = (action for action in commands.parser()._actions if action.dest == "command")
        helps: dict[str, set[str]] = {}
        for parser in whole.choices.values():
            for action in parser._actions:
                for option in set(action.option_strings) & {"--backward", "--mode", "--calls", "--json", "--devices"}:
                    helps.setdefault(option, set()).add(action.help)
        self.assertEqual({option: len(texts) for option, texts in helps.items()}, dict.fromkeys(helps, 1))
        self.assertEqual(len(helps), 5)
        documented = (form.ROOT / "docs" / "tools.md").read_text()
        help = " ".join(self.here("--help")[1].split())
        for status, text in STATUSES.items():
            self.assertIn(f"| {status} | {text} |", documented)
            self.assertIn(f"{status} {text}", help)

    def test_exit_statuses(self) -> None:
        path = Path(self.enterContext(tempfile.TemporaryDirectory()), "model.py")
        path.write_text(textwrap.dedent(EXITS))

        ends = {"prefetch_loop": KeyboardInterrupt(), "transformer_side_branch": ModuleNotFoundError("transformers")}

        def compile_program(name: str, out: Path) -> Any:
            if name in ends:
                raise ends[name]
            return demo.Compilation(name, (), (), none := demo.Events(0, 0), none, None)

        self.enterContext(mock.patch.object(demo, "compile_program", compile_program))
        compile_only = ["demo", "--compile-only", "--out", str(path.parent)]
        cases = [([*compile_only, "moe_experts"], 0), ([*compile_only, "transformer_side_branch"], 1)]
        cases += [([*compile_only, "none"], 2), ([*compile_only, "prefetch_loop"], 130)]
        for command in ("explain", "check", "doctor", "timeline"):
            simulate = [] if command == "check" else ["--simulate"]
            cases += [([command, *simulate, f"{path}:{f}"], n) for f, n in (("f", 0), ("fails", 2), ("stops", 130))]
        under = ["--no-tries", "--simulate", "--fail-under", "1"]
        cases += [(["check", f"{path}:races"], 1), (["doctor", f"{path}:branches", *under], 1)]
        for arguments, expected in cases:
            with self.subTest(arguments=arguments):
                status, _, errors = self.here(*arguments)
                self.assertEqual(status, expected, errors)
        with mock.patch.object(form.overlay, "status", side_effect=KeyboardInterrupt):
            self.assertEqual(self.here("status")[0], 130)

    def test_completion_needs_shtab(self) -> None:
        with mock.patch.dict(sys.modules, {"shtab": None}):
            found = self.here("--print-completion", "bash")
        self.assertEqual(
            found, (2, "", "torch_overlay: --print-completion needs the package shtab: pip install shtab\n")
        )
        shtab = mock.Mock(complete=lambda parser, shell: f"complete {shell} {parser.prog}")
        with mock.patch.dict(sys.modules, {"shtab": shtab}):
            status, out, _ = self.here("--print-completion", "bash")
        self.assertEqual((status, out.splitlines()[0]), (0, "complete bash torch_overlay"))
        self.assertIn(' -m torch_overlay "$@"; }', out)

    def test_width_of_the_terminal(self) -> None:
        with mock.patch.dict("os.environ", COLUMNS="77"):
            self.assertEqual(screen.width(), 77)
            del os.environ["COLUMNS"]
            with mock.patch("os.get_terminal_size", side_effect=[OSError("a pipe"), os.terminal_size((91, 9))]):
                self.assertEqual(screen.width(), 91)
            with mock.patch("os.get_terminal_size", side_effect=OSError):
                self.assertEqual(screen.width(), screen.WIDTH)

    def test_output_that_nobody_reads_or_that_has_no_room(self) -> None:
        """No traceback, of ours or of Python's end."""
        gone, closed = "reader, gone = os.pipe(); os.close(reader); os.dup2(gone, 1)", "os.close(1); sys.stdout = None"
        for first in (gone, closed):
            with self.subTest(first):
                result = form.fork_command("status", first=f"import os\n{first}")
                self.assertEqual((result.returncode, result.stderr), (0, ""))
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "torch_overlay", "status"]
            result = subprocess.run(command, cwd=form.ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        no_room = "torch_overlay: the output could not be written: [Errno 28] No space left on device\n"
        self.assertEqual((result.returncode, result.stderr), (2, no_room))

    def test_characters_that_the_terminal_does_not_have(self) -> None:
        env = {"COLUMNS": "200", "TORCH_OVERLAY_STREAMS": "m\u00f6glich"}
        result = form.fork_command("status", env=env, first="sys.stdout.reconfigure(encoding='ascii')")
        self.assertEqual((result.returncode, result.stderr), (1, ""))
        self.assertIn("TORCH_OVERLAY_STREAMS is 'm\\xf6glich' in the environment", result.stdout)

    def test_another_package_with_this_one_among_its_arguments(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, "package")
            package.mkdir()
            (package / "__init__.py").write_text("import torch_overlay\n")
            (package / "__main__.py").write_text("print(__import__('torch_overlay').status().enabled)\n")
            started = "sys.orig_argv[:] = ['python', '-mpackage', '-mtorch_overlay', 'torch_overlay']"
            run = "runpy.run_module('package', run_name='__main__', alter_sys=True)"
            env = {"PYTHONPATH": os.pathsep.join([folder, str(form.ROOT)])}
            result = form.fork_python(f"import runpy, sys\n{started}\n{run}", env=env)
            self.assertEqual((result.returncode, result.stdout), (0, "True\n"), result.stderr)

    def test_without_docstrings(self) -> None:
        command = [sys.executable, "-OO", "-m", "torch_overlay"]
        result = subprocess.run(command, cwd=form.ROOT, capture_output=True, text=True)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        for name in COMMANDS:
            self.assertIn(f"\n    {name} ", result.stdout)
