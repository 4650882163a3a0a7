"""Finds the operator in which a capture fails, or whose kernels it misses, by capturing once more and looking at each
operator.

Generated code calls libraries, custom operators and what it has no kernel for through torch's dispatcher, where a
dispatch mode sees each call. After each, the stream is asked whether the capture is still whole: an operator may break
it without an error. The line of generated code that made the call leads to the line of the user's program.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch.capture.allocations import OURS
from torch_overlay._inductor.user_lines import is_in_torch


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType, TracebackType

# CUDA's errors about captures, by code: the beginning of CUDA's text, and what the operator did.
ERRORS: dict[int, tuple[str, str]] = {
    900: (
        "operation not permitted when stream is capturing",
        "waits for the device, or allocates or frees its memory itself",
    ),
    901: ("operation failed due to a previous error during capture", "goes on after the capture has failed"),
    902: ("operation would result in a merge of separate capture", "joins the capture with another one"),
    903: ("capture was not ended in the same stream", "ends the capture on another stream"),
    904: ("capturing stream has unjoined work", "launches on another stream that nothing waits for"),
    905: ("dependency created on uncaptured work", "waits for work that was launched before the capture"),
    906: ("operation would make the legacy stream depend", "launches on the default stream"),
    907: ("operation not permitted on an event last recorded in a capturing", "asks for an event of the capture"),
    908: ("attempt to terminate a thread-local capture", "ends the capture in another thread"),
}

ESCAPES = "launches on a stream of its own choice, where a capture does not see it"
DIFFERS = (
    "is called where a graph's first launch had other results than the compiled code: it, or another operator there, "
    "launches where a capture does not see it, or has other results each time; "
    "launch on torch.cuda.current_stream(), and keep no state"
)


@dataclass(frozen=True)
class Culprit:
    operator: str  # name of the overload, "mylib::op.default"
    line: str  # "file:line" of the user's program, or empty
    did: str  # what it did, as the end of a sentence about it
    is_innocent: bool = False  # splitting it off would be wrong: there was no memory, or all models are made of it


class Stopped(Exception):
    """A capture has gone as far as it was to."""


class Suspects(TorchDispatchMode):
    """A dispatch mode for another capture of what a graph is refused for, of the generated module with these globals.
    `found` is the first operator that raises, or after which `is_broken()`. `opaque` are the calls of operators that
    are not torch's; after call `last` of these, the capture is stopped. If `nodes()` returns the handles of the nodes
    that the graph has so far, `made` has the operator and the line of each."""

    supports_higher_order_operators = True

    def __init__(
        self,
        namespace: Mapping[str, Any],
        is_broken: Callable[[], bool],
        last: int | None = None,
        nodes: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        super().__init__()
        self.namespace, self.is_broken, self.last, self.nodes = namespace, is_broken, last, nodes
        self.found: Culprit | None = None
        self.opaque: list[Culprit] = []
        self.made: dict[int, tuple[Any, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = set(self.nodes())
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            self._note(func, error)
            raise
        if self.found is None and self.is_broken():
            self._note(func, None)
        new = [node for node in self.nodes() if node not in before]
        if new and (line := line_of_call(self.namespace)) is not None:
            self.made |= dict.fromkeys(new, (func, line))
        if getattr(func, "namespace", "") not in OURS:
            self.opaque.append(Culprit(name_of(func), line_of_call(self.namespace) or "", ESCAPES))
            if len(self.opaque) - 1 == self.last:
                raise Stopped
        return result

    def _note(self, func: Any, error: Exception | None) -> None:
        line = line_of_call(self.namespace)
        if self.found is None and line is not None:
            innocent = isinstance(error, torch.OutOfMemoryError) or is_core(func)
            self.found = Culprit(name_of(func), line, did(error), innocent)

    def launcher(self, node: int, did: str) -> Culprit | None:
        """Return the operator that made the node."""
        func, line = self.made.get(node, (None, ""))
        return None if func is None else Culprit(name_of(func), line, did, is_core(func))


def is_core(func: Any) -> bool:
    """True for operators that most models are made of. To split off each product, now and in later processes, for what
    may have happened once, is worse than no graph."""
    return torch.Tag.core in getattr(func, "tags", ())


def line_of_call(namespace: Mapping[str, Any]) -> str | None:
    """Return the user's line for the call that the generated module with these globals makes now; None if there is no
    such call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is not namespace:
        frame = frame.f_back
    return None if frame is None else user_line(frame.f_code.co_filename, frame.f_lineno)


def name_of(func: Any) -> str:
    """Return "namespace::name.overload" of an operator; the plain name of a higher-order operator."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return func.name() if callable(getattr(func, "name", None)) else str(func)
    return f"{schema.name}.{schema.overload_name or 'default'}"


def did(error: BaseException | None) -> str:
    """Return what an operator did that raised this error in a capture."""
    if error is None:
        return "breaks the capture"
    code = getattr(error, "error_code", None)
    text = str(error)
    for number, (begin, what) in ERRORS.items():
        if code == number or begin in text:
            return f"{what} (CUDA error {number})"
    lines = text.strip().splitlines() or [""]
    return f"raises {type(error).__name__}: {lines[0]}"


def user_line(path: str, line: int) -> str:
    """Return "file:line" of the user's program for a line of generated code; empty if it is not known."""
    from torch._inductor.codecache import PyCodeCache

    frames = PyCodeCache.stack_frames_for_code(path, line) or []
    ours = [frame for frame in frames if not is_in_torch(frame["filename"])] or frames
    return f"{ours[0]['filename']}:{ours[0]['line']}" if ours else ""


def line_of_error(error: BaseException, namespace: Mapping[str, Any]) -> str:
    """Return the line of the user's program whose code raised this error."""
    trace: TracebackType | None = error.__traceback__
    found = ""
    while trace is not None:
        if trace.tb_frame.f_globals is namespace:
            found = user_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found
