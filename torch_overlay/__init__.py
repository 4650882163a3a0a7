"""Adds user streams and CUDA graphs to torch.compile, on a stock PyTorch.

    import torch_overlay

before `torch.compile` is all it takes: the import enables the overlay. `disable()` restores stock PyTorch, `status()`
says whether it is enabled and why. With TORCH_OVERLAY_DISABLE=1 in the environment the package can be imported and
installs nothing; a bad value in the variable of an option (`config`) is a ValueError.

Note [What the import does]
The import verifies the installed PyTorch; if it is not the release that the overlay was written for, it raises an
OverlayError. It imports torch and no compiler module, and does not initialise CUDA. When the first compilation begins,
hooks are put around the functions listed in `seam_table.py`, all of them or none; `enable()` does so at once. A forked
child inherits the state; a spawned child has the overlay if its main module imports it. Code compiled before enable()
or disable() doesn't change until torch._dynamo.reset(); a warning says so.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TYPE_CHECKING

from torch_overlay._engine.install import forget_after_import, Installer, is_importing
from torch_overlay._options import switched_on
from torch_overlay.errors import OverlayError
from torch_overlay.version import __version__


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._engine.report import Status
    from torch_overlay._inductor.relaunch.coverage import Coverage
    from torch_overlay.analysis.doctor import Diagnosis
    from torch_overlay.seams import Seam

__all__ = ["OverlayError", "__version__", "config", "coverage", "disable", "doctor", "enable", "status"]


DISABLE = "TORCH_OVERLAY_DISABLE"


def _seams() -> Sequence[Seam]:
    from torch_overlay.seam_table import SEAMS

    return SEAMS


# importlib.reload runs this file again in the same namespace; installed seams stay installed.
_installer: Installer = globals().get("_installer") or Installer(_seams)


def _context_init(original: Callable[..., None], self: Any, *args: Any) -> None:
    """Wrap the constructors of torch._guards with which every compilation begins."""
    _installer.before_compilation()
    original(self, *args)


def _enable(install: Callable[[], None]) -> None:
    try:
        if switched_on(DISABLE):
            _installer.off_because = f"{DISABLE}={os.environ[DISABLE]} is set in the environment"
            return
    except ValueError as error:
        _installer.off_because = f"enable() failed: {error}"
        raise
    install()


def enable() -> None:
    """Install every hook now, or raise an OverlayError and install none. Does nothing if they are installed.

    The import of the package has them installed when the first compilation begins; this imports PyTorch's compiler. It
    is for a program that then imports a library that replaces functions of the compiler."""
    _enable(_installer.enable)


def disable() -> None:
    """Remove every seam: the exact inverse of enable(). Does nothing if none is installed."""
    _installer.disable()


def status() -> Status:
    """Return what is installed, and why or why not. Printing it gives a table."""
    from torch_overlay._engine.report import make_status

    return make_status(_installer)


def coverage() -> Coverage:
    """Return how much of the compiled code of this process runs in CUDA graphs, and what does not, with its cause.
    Printing it gives a table; `to_json()` gives the same as text of JSON."""
    from torch_overlay._inductor.relaunch import coverage as module

    return module.coverage()


def doctor(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    steps: int = 8,
    remedy: Callable[..., Any] | None = None,
) -> Diagnosis:
    """Run `fn(*args)` for some steps, and return what keeps it out of CUDA graphs, what that costs, and what to change.

    A function that isn't compiled, and calls no code that asks for CUDA graphs, is compiled with
    mode="reduce-overhead"; `backward` runs the backward of the sum of its outputs as well. `remedy` is the function as
    you have changed it: it is tried on the same arguments, as are the switches among the remedies. Printing the result
    gives a report; it has `to_json()` and `to_html()`. Without a GPU, call it inside
    `torch_overlay.testing.simulated_gpu()`: nothing is computed or timed there. Raises ValueError for fewer than 4
    steps, and for a function of which compilation leaves nothing."""
    from torch_overlay.analysis.doctor import diagnose

    return diagnose(fn, *args, backward=backward, steps=steps, remedy=remedy)


def __getattr__(name: str) -> Any:
    if name == "config":
        import importlib

        return importlib.import_module("torch_overlay.config")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _runs_as_command() -> bool:
    """True for `python -m torch_overlay`; then __main__ enables the overlay, and reports a failure in its own way."""
    if sys.argv[:1] != ["-m"]:
        return False
    module = sys.orig_argv[-len(sys.argv)]  # before the arguments, which may be any words
    return module in (__name__, f"-m{__name__}")


if is_importing(sys.modules.get("torch")):
    # torch imports every package that TORCH_LOGS names. That is not the user's `import torch_overlay`.
    forget_after_import(__name__)
elif not _runs_as_command():
    _enable(_installer.wait_for_compilation)
