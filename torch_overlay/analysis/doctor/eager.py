"""Sees what a program does beside compiled code: operators on the device, by line, and waits of the host.

On a GPU as on a simulated device, a dispatch mode sees each operator. It is one launch here, as a call of a library is
in generated code. The mode also sees the operators that compiled code calls, and leaves them out.

Finds where the host waits for the device: torch warns at each such call, and the stack has the user's line.

Waits are counted from the first compiled code on. Those of the compiler and of a capture, which a step has once, are
left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections import Counter, defaultdict
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch import coverage
from torch_overlay._inductor.relaunch.capture.culprit import user_line
from torch_overlay._inductor.relaunch.causes import CAUSES
from torch_overlay._inductor.relaunch.coverage import Outside
from torch_overlay._inductor.user_lines import is_in_torch
from torch_overlay.analysis.race_check.simulated_operators import Operator
from torch_overlay.analysis.race_check.source_lines import _is_compiling, outward


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


OURS = f"{__name__.partition('.analysis.')[0]}."
CAPTURES = f"{OURS}_inductor.relaunch.capture."
OTHERS = (
    os.sep + "warnings.py",
    os.sep + "contextlib.py",
    os.sep + "threading.py",
    os.path.join("unittest", "mock.py"),
)
TUNES = os.path.join(os.path.dirname(torch.__file__), "_inductor", "runtime", "")  # and launches what it has chosen
TEXT = "called a synchronizing CUDA operation"


@contextlib.contextmanager
def noted_waits() -> Iterator[Counter[str]]:
    """Count the waits inside, by "file:line" of the program. Needs a GPU, which may be initialised inside."""
    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if TEXT in str(message):
            if coverage.live and not _is_compiling() and (line := _line()) is not None:
                found[line] += 1
        else:
            original(message, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{TEXT}")
        original, warnings.showwarning = warnings.showwarning, show
        torch.cuda._lazy_call(lambda: _set_mode(1))
        try:
            yield found
        finally:
            torch.cuda._lazy_call(lambda: _set_mode(before))


def _set_mode(mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at the first call that the mode is a prototype
        torch._C._cuda_set_sync_debug_mode(mode)


def _line() -> str | None:
    """The line of the program that is running, or that the running line of generated code comes from; None for a wait
    of a capture, or of a choice among kernels."""
    for frame in outward(sys._getframe()):
        if line := user_line(frame.f_code.co_filename, frame.f_lineno):
            return line
        if is_program(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_globals.get("__name__", "").startswith(CAPTURES) or frame.f_code.co_filename.startswith(TUNES):
            return None
    return ""


def is_program(frame: FrameType) -> bool:
    """True for a frame outside of torch and of ours."""
    path = frame.f_code.co_filename
    is_ours = frame.f_globals.get("__name__", "").startswith(OURS)
    return not (is_ours or is_in_torch(path) or path.startswith("<") or path.endswith(OTHERS))


TORCH = os.path.dirname(torch.__file__)
COMPILED = os.path.join(TORCH, "_inductor", "output_code.py")  # calls generated code
OPTIMIZER = os.path.join(TORCH, "optim", "")
BACKWARD = tuple(os.path.join(TORCH, "autograd", name) for name in ("graph.py", "__init__.py"))  # to autograd's engine
FIRST_GRADIENT = {"aten::ones_like"}  # of backward() itself
STEP = os.path.join(os.path.dirname(__file__), "diagnose.py")  # calls the program
ALLOCATES = ("aten::empty", "aten::new_empty", "aten::record_stream", "prim::")
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the host needs the data
WAITS = (
    (torch._C, "_cuda_synchronize"),
    (torch._C, "_accelerator_synchronizeDevice"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)


class EagerLaunches:
    """`launches`: for each code of a cause and line, how often each operator was called; `waits` by line."""

    def __init__(self) -> None:
        self.launches: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.waits: Counter[str] = Counter()

    def outside(self) -> tuple[Outside, ...]:
        """Return the launches as coverage has them, a cause for each line."""
        found = []
        for (code, line), operators in self.launches.items():
            names = [f"{name} ({n})" if n > 1 else name for name, n in operators.most_common(4)]
            names += ["..."] * (len(operators) > 4)
            message = f"{CAUSES[code].title}: {', '.join(names)}"
            calls = operators.total()
            remedy = "" if operators.keys() <= FIRST_GRADIENT and code == "eager-backward" else CAUSES[code].remedy
            found.append(Outside(code, "", line, message, remedy, calls, calls))
        return tuple(found)

    def times(self, known: dict[str, tuple[float, float]]) -> dict[tuple[str, str], tuple[float, float]]:
        """Return (host us, device us) for each code and line, if those of each operator are `known`: every call of an
        operator is given the same part."""
        of_operator = Counter[str]()
        for operators in self.launches.values():
            of_operator.update(operators)
        found = {}
        for where, called in self.launches.items():
            parts = [(known[o], n / of_operator[o]) for o, n in called.items() if o in known]
            if parts:
                found[where] = sum(t[0] * part for t, part in parts), sum(t[1] * part for t, part in parts)
        return found


class _OperatorWatch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, seen: EagerLaunches) -> None:
        super().__init__()
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Dynamo compiles inside of this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if coverage.live and not _is_compiling() and (schema := getattr(func, "_schema", None)) is not None:
            launches, waits = _effects(func, args, kwargs or {}, out)
            if (launches or waits) and (where := _where()) is not None:
                if launches:
                    self.seen.launches[where][schema.name] += 1
                if waits:
                    self.seen.waits[where[1]] += 1
        return out


def _effects(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[bool, bool]:
    """Return if an operator launches work on the device, and if the host waits for it."""
    try:
        operator = Operator(func, args, kwargs, out)
        touched = operator.touched
        if not any(t.is_cuda for t in touched) or operator.is_view or func._schema.name.startswith(ALLOCATES):
            return False, False
        if not any(t.numel() for t in touched):
            return False, False
    except (NotImplementedError, RuntimeError):  # a tensor without one storage: sparse, nested
        return True, False
    if READS.intersection(func.tags):
        return any(t.is_cuda for t in operator.changed), True
    return bool(operator.changed), operator.blocks_host(torch.Tensor.is_pinned)


def _where() -> tuple[str, str] | None:
    """Return the code of the cause, and the line of the program that is running; None in compiled code, and for work
    of the doctor's own."""
    code, line = "eager", ""
    for frame in _stack():
        path = frame.f_code.co_filename
        if path == COMPILED:
            return None
        if path == STEP:  # its own backward is the function's
            return (code, line) if line or code == "eager-backward" else None
        if path.startswith(OPTIMIZER) and not line:
            code = "eager-optimizer"
        if path in BACKWARD and not line and code == "eager":
            code = "eager-backward"
        if not line and is_program(frame):
            line = f"{path}:{frame.f_lineno}"
    return code, line


def _stack() -> Iterator[FrameType]:
    """The frames of this thread, innermost first; if it is one of autograd's, then those of the thread that waits for
    it."""
    frame = sys._getframe(2)
    yield from outward(frame)
    if isinstance(threading.current_thread(), threading._DummyThread):
        for other in sys._current_frames().values():
            if other is not frame and any(f.f_code.co_filename in BACKWARD for f in outward(other)):
                yield from outward(other)
                return


@contextlib.contextmanager
def watched() -> Iterator[EagerLaunches]:
    """See what this thread, and threads that start inside, do beside compiled code, once there is compiled code."""
    seen = EagerLaunches()
    start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run(thread: threading.Thread) -> None:
        with _OperatorWatch(seen):
            start(thread)

    def counted(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def run(*args: Any, **kwargs: Any) -> Any:
            if coverage.live and not _is_compiling() and (where := _where()) is not None:
                seen.waits[where[1]] += 1
            return wait(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "_bootstrap_inner", run))
        for owner, name in WAITS:
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        stack.enter_context(_OperatorWatch(seen))
        yield seen
