"""A package to be hooked, and the hooks."""

from __future__ import annotations

import importlib
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import form


if not form.PATCHED:
    from torch_overlay._engine import verify
    from torch_overlay._engine.install import Installer
    from torch_overlay.errors import OverlayError
    from torch_overlay.seams import fingerprint, Seam


UPSTREAM = """
import contextlib
import functools

TABLE = {}

def plain(x):
    return x + 1

TABLE["plain"] = plain

@functools.lru_cache(None)
def cached(x):
    return x + 2

@contextlib.contextmanager
def managed():
    yield 3

class Record:
    def __init__(self, function):
        self.function = function

class Thing:
    @staticmethod
    def static(x):
        return x + 4

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x)

    @property
    def prop(self):
        return 5

    @functools.cached_property
    def once(self):
        return 6

    def method(self, x):
        return x + 7

    table = {"method": Record(method)}

class Child(Thing):
    pass

REGISTERED = []
"""


HOLDER = """
from torchfake.upstream import plain, plain as other_name
"""


OURS = """
CALLS = []

def times_ten(original, *args, **kwargs):
    CALLS.append(original.__name__)
    return original(*args, **kwargs) * 10

def pass_on(original, *args, **kwargs):
    CALLS.append(original.__name__)
    return original(*args, **kwargs)

def register(module):
    module.REGISTERED.append("ours")
    return lambda: module.REGISTERED.remove("ours")

def register_badly(module):
    return None

def register_and_fail(module):
    raise ZeroDivisionError
"""


class FakeUpstream(unittest.TestCase):
    """A package `torchfake` with a folder of its own, and installers for tables about it."""

    def setUp(self) -> None:
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.root / "torchfake").mkdir()
        self.write("torchfake/__init__.py", "")
        self.write("torchfake/upstream.py", UPSTREAM)
        self.write("torchfake/holder.py", HOLDER)
        self.write("torchfake_ours.py", OURS)
        sys.path.insert(0, str(self.root))
        self.addCleanup(sys.path.remove, str(self.root))
        self.addCleanup(self.forget)
        self.enterContext(mock.patch.object(verify, "torch_root", return_value=self.root))
        self.installers: list[Installer] = []

    def forget(self) -> None:
        for installer in self.installers:
            installer.disable()
        for name in [name for name in sys.modules if name.startswith("torchfake")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(textwrap.dedent(text))

    def seam(self, name: str, impl: str = "times_ten", kind: str = "wrap", **kwargs) -> Seam:
        mark = fingerprint(textwrap.dedent(UPSTREAM), name) if kind != "register" else ""
        target = f"torchfake.upstream:{name}"
        return Seam(target, f"torchfake_ours:{impl}", kind, None, kwargs.pop("fingerprint", mark), "a test", **kwargs)

    def installer(self, *seams: Seam) -> Installer:
        installer = Installer(lambda: seams)
        self.installers.append(installer)
        return installer

    def enabled(self, *seams: Seam | str) -> Installer:
        """An installer that has installed seams, or those of functions with these names."""
        installer = self.installer(*(self.seam(s) if isinstance(s, str) else s for s in seams))
        installer.enable()
        return installer

    def waiting(self, *seams: Seam | str) -> Installer:
        """An installer that has yet to install them."""
        installer = self.installer(*(self.seam(s) if isinstance(s, str) else s for s in seams))
        installer.wait_for_compilation()
        return installer

    def load(self, name: str = "upstream"):
        return importlib.import_module(f"torchfake.{name}")

    def refused(self, reason: str, *seams: Seam) -> OverlayError:
        """enable() raises that reason, and the module is as it was."""
        module = sys.modules.get("torchfake.upstream")
        classes = [value for value in vars(module).values() if isinstance(value, type)] if module else []
        before = [dict(vars(owner)) for owner in ([module] if module else []) + classes]
        installer = self.installer(*seams)
        with self.assertRaises(OverlayError) as caught:
            installer.enable()
        self.assertEqual(caught.exception.reason, reason)
        self.assertFalse(installer.enabled)
        self.assertIn(reason, installer.off_because)
        self.assertEqual(before, [dict(vars(owner)) for owner in ([module] if module else []) + classes])
        return caught.exception
