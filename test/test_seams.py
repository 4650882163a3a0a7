"""The seam table against the installed PyTorch: a drift test for every entry, and proof that nothing is left behind.

Every test here reads the table, so an entry is covered from the moment that it is written.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import unittest
from pathlib import Path
from typing import Any

import form


if not form.PATCHED:
    import fingerprint
    from torch_overlay.hooks import resolve
    from torch_overlay.seam_table import PATCHES, SEAMS

# Imports all modules of the compile stack that can be imported here.
IMPORT_ALL = """
import contextlib, gc, importlib, io, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch_overlay_table import SEAMS

def import_all():
    for package in ("torch._dynamo", "torch._functorch", "torch._inductor"):
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            if not any(part in info.name for part in (".fb", "__main__", ".autoheuristic", "compile_worker")):
                with contextlib.suppress(Exception):
                    importlib.import_module(info.name)
    for seam in SEAMS:
        importlib.import_module(seam.module)
"""

# The table without the package's __init__, that is, before anything is enabled.
LOAD_TABLE = """
import os, sys, types
os.environ["TORCH_OVERLAY_DISABLE"] = "1"
from torch_overlay.seam_table import SEAMS
sys.modules["torch_overlay_table"] = types.SimpleNamespace(SEAMS=SEAMS)
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_overlay"]:
    del sys.modules[name]
del os.environ["TORCH_OVERLAY_DISABLE"]
"""

ENABLE = """
import torch_overlay
torch_overlay.enable()
assert torch_overlay.status().enabled
"""


def run(*parts: str, start: Any = form.run_python) -> str:
    result = start("\n".join([LOAD_TABLE, IMPORT_ALL, *parts]))
    if result.returncode != 0:
        raise AssertionError(result.stdout + result.stderr[-4000:])
    return result.stdout


@form.overlay_only
class TestTable(unittest.TestCase):
    def test_every_fingerprint_is_that_of_the_installed_torch(self) -> None:
        self.assertEqual(fingerprint.differences(fingerprint.installed_root()), [])

    def test_targets_are_unique(self) -> None:
        targets = [hook.target for seam in SEAMS for hook in seam.hooks]
        self.assertEqual(sorted(targets), sorted(set(targets)))

    def test_every_patch_exists(self) -> None:
        slugs = {patch.slug for patch in PATCHES}
        self.assertEqual({seam.patch for seam in SEAMS if seam.patch is not None} - slugs, set())
        self.assertEqual(len(slugs), len(PATCHES))

    def test_every_seam_says_why(self) -> None:
        for seam in SEAMS:
            with self.subTest(seam.target):
                self.assertGreater(len(seam.why), 20)

    def test_every_implementation_takes_what_its_kind_hands_over(self) -> None:
        for seam in itertools.chain(*(seam.hooks for seam in SEAMS)):
            with self.subTest(seam.target):
                importlib.import_module("torch._dynamo")  # a hook runs long after this
                importlib.import_module(seam.module)
                parameters = list(inspect.signature(resolve(seam.impl)).parameters.values())
                self.assertTrue(parameters)
                if seam.kind == "wrap":
                    self.assertEqual(parameters[0].name, "original")
                else:
                    self.assertEqual(len([p for p in parameters if p.default is p.empty]), 1)

    def test_docstrings_of_the_engine_files_name_no_version(self) -> None:
        for path in (form.ROOT / "torch_overlay").rglob("*.py"):
            with self.subTest(path.name):
                self.assertNotIn('"2.15', path.read_text())


@form.overlay_only
class TestExactInverse(unittest.TestCase):
    SNAPSHOT = """
def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(getattr(module, "__dict__", None), dict):
            for key, value in list(vars(module).items()):
                found[name, key] = value
    for seam in SEAMS:
        owner = sys.modules[seam.module]
        for part in seam.qualname.split(".")[:-1]:
            owner = vars(owner)[part]
            for key, value in vars(owner).items():
                found[seam.module, owner.__qualname__, key] = value
    return found

def changed(before, after):
    found = {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}
    # A compiled regular expression is made anew. Operators stay defined, as the modules that define them stay
    # loaded: code compiled by the overlay refers to them.
    found.discard(("torch._dynamo.trace_rules", "SKIP_DIRS_RE"))
    return sorted(key for key in found if key not in before and key[0] != "torch.ops" or key in before)

def hooks_alive():
    gc.collect()
    return [o for o in gc.get_objects() if type(o).__name__ == "function" and "__overlay__" in o.__dict__]
"""

    @form.slow
    def test_modules_loaded_before(self) -> None:
        run(
            "import_all()",
            self.SNAPSHOT,
            "before = snapshot()",
            "skip = list(torch._dynamo.trace_rules.SKIP_DIRS)",
            "logs = dict(torch._logging._internal.log_registry.log_alias_to_log_qnames)",
            "path = list(sys.meta_path)",
            ENABLE,
            """
wraps = [hook for seam in SEAMS for hook in seam.hooks if hook.kind == "wrap"]
assert len(hooks_alive()) == len(wraps), hooks_alive()
assert all(state.state == "installed" for state in torch_overlay.status().seams)
installed = snapshot()
assert changed(before, installed)
torch_overlay.enable()
assert not changed(installed, snapshot()), "enabling twice changed something"
torch_overlay.disable()
assert not changed(before, snapshot()), changed(before, snapshot())
assert skip == torch._dynamo.trace_rules.SKIP_DIRS
assert logs == torch._logging._internal.log_registry.log_alias_to_log_qnames
assert path == sys.meta_path
installed.clear()
assert not hooks_alive(), hooks_alive()
torch_overlay.disable()
torch_overlay.enable()
torch_overlay.disable()
assert not changed(before, snapshot()), changed(before, snapshot())
""",
        )

    @form.slow
    def test_modules_loaded_after(self) -> None:
        run(
            ENABLE,
            self.SNAPSHOT,
            """
import_all()
wraps = [hook for seam in SEAMS for hook in seam.hooks if hook.kind == "wrap"]
assert len(hooks_alive()) == len(wraps), hooks_alive()
assert all(state.state == "installed" for state in torch_overlay.status().seams)
torch_overlay.disable()
assert not hooks_alive(), hooks_alive()
before = snapshot()
torch_overlay.enable()
torch_overlay.disable()
assert not changed(before, snapshot()), changed(before, snapshot())
""",
        )


@form.overlay_only
class TestLateHolders(unittest.TestCase):
    """Asks the garbage collector who refers to an original. Only the overlay's own records may."""

    REFERRERS = """
import types
from torch_overlay._engine import verify

def is_ours(referrer, change):
    hook, place = verify.unwrap_descriptor(change.hook), change.place
    if referrer is place or referrer is place.raw or referrer is getattr(place.raw, "__dict__", None):
        return True
    if isinstance(referrer, dict):
        # functools.wraps leaves a __wrapped__ that nobody calls. A wrapper that calls it has it in a cell as well.
        return [key for key, value in referrer.items() if value is place.original] == ["__wrapped__"]
    if isinstance(referrer, types.CellType):
        return any(referrer is cell for cell in hook.__closure__ or ())
    return isinstance(referrer, types.FrameType)

def strangers(change):
    place = change.place
    found = gc.get_referrers(place.original)
    if place.raw is not place.original:
        found += [referrer for referrer in gc.get_referrers(place.raw) if referrer is not found]
    return [(type(r).__name__, repr(r)[:300]) for r in found if not is_ours(r, change)]

gc.collect()
# A class that was replaced lives on as the base of its replacement.
changes = [c for c in torch_overlay._installer.changes.values() if c.seam.kind == "wrap"]
assert changes
found = {}
for change in changes:
    left = strangers(change)
    if left:
        found[change.seam.target] = left
assert not found, found
"""

    def test_dynamo_has_the_rules_of_originals_for_hooks(self) -> None:
        """Whether it made its table of rules before the hooks or after; and their originals have them again."""
        make = "torch._dynamo.trace_rules.get_torch_obj_rule_map()"
        for early, start in ((make, form.fork_python), ("", form.run_python)):
            run(
                early,
                ENABLE,
                """
rules = torch._dynamo.trace_rules.get_torch_obj_rule_map()
hook = torch.cuda.memory.memory_stats_as_nested_dict
assert hook in rules and hook.__wrapped__ not in rules
torch_overlay.disable()
assert hook not in rules and torch.cuda.memory.memory_stats_as_nested_dict in rules
""",
                start=start,
            )

    @form.slow
    def test_no_holder_of_an_original_is_left_when_modules_were_loaded_before(self) -> None:
        run("import_all()", ENABLE, self.REFERRERS)

    @form.slow
    def test_no_holder_of_an_original_is_left_when_modules_are_loaded_after(self) -> None:
        run(ENABLE, "import_all()", self.REFERRERS)

    @form.slow
    def test_the_test_sees_a_holder(self) -> None:
        keep = "from torch._inductor import codecache\nkept = [codecache.FxGraphHashDetails.__init__]"
        with self.assertRaisesRegex(AssertionError, "FxGraphHashDetails"):
            run(keep, ENABLE, self.REFERRERS)


class TestHooks(unittest.TestCase):
    """Both forms go through the same decorators."""

    def test_a_hook_hands_the_original_to_the_implementation(self) -> None:
        from torch_overlay.hooks import wrapped_by

        @wrapped_by("test_seams:double")
        def seven(extra: int = 0) -> int:
            """Seven."""
            return 7 + extra

        self.assertEqual((seven(), seven(extra=1)), (14, 16))
        self.assertEqual((seven.__name__, seven.__doc__), ("seven", "Seven."))
        self.assertEqual(str(inspect.signature(seven)), "(extra: 'int' = 0) -> 'int'")

    def test_an_implementation_is_imported_at_the_first_call_only(self) -> None:
        from torch_overlay.hooks import wrapped_by

        hook = wrapped_by("test_seams:no_such_name")(len)
        with self.assertRaises(AttributeError):
            hook([])

    def test_hooks_import_nothing_of_torch(self) -> None:
        path = Path(inspect.getfile(sys.modules[form.overlay.__name__])).parent / "hooks.py"
        code = f"import runpy, sys; runpy.run_path({str(path)!r}); assert 'torch' not in sys.modules"
        self.assertEqual(form.run_python(code).returncode, 0)


def double(original, *args, **kwargs):
    return 2 * original(*args, **kwargs)
