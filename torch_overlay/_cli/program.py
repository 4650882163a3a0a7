"""Loads the function that a command line names, FILE:FUNCTION, and its inputs."""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
import traceback
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._cli.commands import UsageError
from torch_overlay.testing import _observe, simulated_gpu


if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

INTERRUPTED = "was interrupted"  # how a program ended


def failure(error: BaseException, path: str) -> str:
    """Return what the error of a program says, after the innermost line of the program's file that it came through."""
    text = "".join(traceback.format_exception_only(error)).strip()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}: {text}" if lines else text


def run_script(path: str, arguments: Iterable[str]) -> str:
    """Run a script as `python PATH` would. Return how it ended, if it did not run through."""
    with importable(path, arguments):
        return ended(path, lambda: runpy.run_path(path, run_name="__main__"))


def ended(path: str, run: Callable[[], Any]) -> str:
    """Call a part of the program of `path`. Return how it ended, if it did not run through."""
    try:
        run()
    except UsageError:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return f"exited with status {status}" if status else ""
    except Exception as error:
        return f"failed: {' '.join(failure(error, path).split())}"
    return ""


@contextlib.contextmanager
def running(options: argparse.Namespace, around: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Load and run a function of the user's inside: an error of the program is one line that names its place."""
    with importable(options.path), around:
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            text = " ".join(failure(error, options.path).split())
            raise UsageError(f"{options.target} could not be run: {text}") from error


def device(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the device that the program runs on: its value is the simulation, or None for a GPU."""
    simulate = not hasattr(options, "simulate") or options.simulate or not torch.cuda.is_available()
    return simulated_gpu(options.devices) if simulate else contextlib.nullcontext()


@contextlib.contextmanager
def importable(path: str, arguments: Iterable[str] = ()) -> Iterator[None]:
    """Put the file's folder first on `sys.path`, and its arguments in `sys.argv`, as for a script. Raises
    UsageError if the program exits inside: that would end the command without a report.
    """
    before, argv = list(sys.path), sys.argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path, *arguments]
    try:
        yield
    except SystemExit as error:
        raise UsageError(f"{path} exited with {error.code} where it was to be loaded or called") from error
    finally:
        sys.path[:], sys.argv = before, argv  # the program may have changed them


def load(path: str, name: str, inputs_of: str = "", other: str = "") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Run a file and return its function `name` with its inputs, or those of the function `inputs_of`; without a name,
    the result of the file's `make()`. Called inside `importable`. Raises UsageError if there is no function of that
    name, or named `other`, or if nothing gives its inputs.
    """
    module = runpy.run_path(path, run_name="loaded")
    if not name:
        if not callable(make := module.get("make")):
            raise UsageError(f"{path} has no function make() that returns a function and its arguments")
        if not (isinstance(made := make(), tuple) and len(made) == 2):
            raise UsageError(f"make() of {path} returned no pair of a function and its arguments")
        return made
    for each in filter(None, (name, other)):
        if isinstance(found := module.get(each), type):
            raise UsageError(f"{each} of {path} is a class: name a function, or an instance of the class")
        if not callable(found):
            raise UsageError(f"{path} has no function {each}")
    given = inputs_of or name
    return module[name], _inputs(path, module, given, module[given])


def as_compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile what `load` returned. Raises UsageError for a mode that there isn't, or that would have no effect."""
    try:
        return _observe.as_compiled(fn, **options)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _inputs(path: str, module: dict[str, Any], name: str, fn: Callable[..., Any]) -> tuple[Any, ...]:
    signature = None
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(fn) if not isinstance(fn, torch.nn.Module) else None
    has_none = signature is not None and not signature.parameters
    for provider in [f"{name}_inputs"] if has_none else [f"{name}_inputs", "example_inputs"]:
        if provider in module:
            made = module[provider]()
            return made if isinstance(made, tuple) else (made,)
    if signature is not None:
        with contextlib.suppress(TypeError):
            signature.bind()
            return ()
    raise UsageError(
        f"{name} takes arguments: {path} should define {name}_inputs() or example_inputs() that returns them"
    )
