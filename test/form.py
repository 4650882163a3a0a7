"""Which form of the project is under test?

The suite runs in two forms: with the overlay installed on a stock PyTorch, and without it on a PyTorch tree that has
the patch series applied, where the same modules live in torch/_overlay. A test imports this module before anything
of ours, and then writes imports as for the overlay form:

    import form
    from torch_overlay.testing import compile_only

In the patched form every `torch_overlay` module is an alias of the `torch._overlay` module, the very same object.
Tests of what only the overlay form has (its engine, its command line) carry `@form.overlay_only`.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import forked


Case = TypeVar("Case")

ROOT = Path(__file__).resolve().parent.parent
PATCHED = importlib.util.find_spec("torch._overlay") is not None

overlay_only = unittest.skipIf(PATCHED, "the patched form has no overlay engine")


def needs_gpu(test: Any) -> Any:
    """Decorator of a test or a class of them: it has the mark `gpu`, and is skipped where there is no GPU."""
    import pytest
    import torch

    return pytest.mark.gpu(unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA GPU")(test))


def slow(test: Any) -> Any:
    """Decorator of a test or a class of them: it has the mark `slow`, and runs with `--slow`."""
    import pytest

    return pytest.mark.slow(test)


def sampled(cases: Sequence[Case], part: int) -> list[Any]:
    """All cases, for `parametrize`. Every `part`th one always runs, the others have the mark `slow`: they run with
    `--slow`. For tests that compile a whole corpus of programs, no others. An odd `part` takes of each mode some.
    """
    import pytest
    from torch.testing._internal.common_utils import subtest

    return [subtest(case, decorators=[pytest.mark.slow] if i % part else []) for i, case in enumerate(cases)]


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torch_overlay.x` as `torch._overlay.x`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torch_overlay":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.replace("torch_overlay", "torch._overlay", 1))
        self.genuine_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.genuine_spec


def environment_of(env: dict[str, str] | None) -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "test"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **(env or {})}


def run_python(code: str, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that can import the overlay and this module; both outputs are captured."""
    command: Sequence[str] = [sys.executable, *options, "-c", code]
    environment = environment_of(env)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=ROOT / "test")


def fork_python(code: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Like `run_python`, in a tenth of its time, in an interpreter that has imported PyTorch's compiler. For code to
    which the order of imports doesn't matter, nor a variable that Python or PyTorch reads as it starts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*forked.PRELOADED])  # only the first call starts a server
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in outputs:
            file.touch()
        process = context.Process(target=forked.run, args=(code, arguments, environment_of(env), outputs))
        process.start()
        process.join(1800)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(code, 1800)
        return subprocess.CompletedProcess(
            code, process.exitcode, *(file.read_text(errors="replace") for file in outputs)
        )


def fork_command(
    *arguments: str, env: dict[str, str] | None = None, first: str = ""
) -> subprocess.CompletedProcess[str]:
    """`python -m torch_overlay arguments`, through `fork_python`; after this code."""
    started = "sys.argv[0] = '-m'; sys.orig_argv[:] = ['python', '-m', 'torch_overlay', *sys.argv[1:]]"
    command = "runpy.run_module('torch_overlay', run_name='__main__', alter_sys=True)"
    return fork_python(f"import runpy, sys\n{first}\n{started}\n{command}", *arguments, env=env)


if PATCHED:
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
elif str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

overlay = importlib.import_module("torch_overlay")
