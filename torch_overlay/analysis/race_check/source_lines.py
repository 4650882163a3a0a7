"""Find the source of a simulated operation: the line of generated code, and the user's line."""

from __future__ import annotations

import linecache
import sys
from typing import TYPE_CHECKING

import torch
import torch._dynamo.compiled_autograd

from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.runtime import EventFrame
from torch_overlay.testing._text import as_line, OURS, TORCH


if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def _is_compiling() -> bool:
    """True during compilation. A running graph of compiled autograd doesn't count: its context compiles no frame."""
    context = torch._guards.CompileContext.try_get()
    if context is None:
        return False
    is_running = torch._dynamo.compiled_autograd.in_compiled_autograd_region
    return not (is_running and context.compile_id is not None and context.compile_id.frame_id is None)


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_generated(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<wrapper")


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((TORCH, OURS, "<")) and not name.endswith("contextlib.py")


def site() -> str:
    """Return the position of the current statement, in generated code or in the user's code."""
    operation = ""
    for frame in outward(sys._getframe()):
        if frame.f_code is EventFrame.run.__code__:
            kind, event, stream = (frame.f_locals[name] for name in ("kind", "event", "stream"))
            number = max(frame.f_locals["self"].region.spec.streams[stream], 0)
            operation = f"{OperationKind(kind).method} ev{event} stream{number}"
        if is_generated(frame):
            at = f"{frame.f_code.co_filename[1:-1]}, line {frame.f_lineno}"
            statement = _statement(frame)
            return f"{at}: " + (f"{operation} in {statement.rpartition(' = ')[2]}" if operation else statement)
        if _is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def _statement(frame: FrameType) -> str:
    lines = frame.f_globals.get("_lines", ())
    return lines[frame.f_lineno - 1].strip() if frame.f_lineno <= len(lines) else ""


def _current() -> FrameType | None:
    """Return the frame of the current statement, in generated code or in the user's code."""
    return next((frame for frame in outward(sys._getframe()) if is_generated(frame) or _is_users(frame)), None)


def user_line() -> str:
    """Return the user's source line for the current statement."""
    if (frame := _current()) is None:
        return ""
    if is_generated(frame):
        return frame.f_globals["_module"].user_line(frame.f_lineno)
    return source_line(frame.f_code.co_filename, frame.f_lineno)


def source_line(path: str, number: int) -> str:
    return as_line(path, number, linecache.getline(path, number).strip())


def assigned_name() -> str:
    """Return the variable that the current statement of generated code assigns ("" if none)."""
    if (frame := _current()) is None or not is_generated(frame):
        return ""
    left = _statement(frame).removeprefix("if multi_stream: ").partition(" = ")[0]
    return left if left.isidentifier() else ""
