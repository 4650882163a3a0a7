"""Keeps Dynamo from tracing our own frames: hooks and what they call also run between a program's compiled parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def register(trace_rules: ModuleType) -> Callable[[], None]:
    """Adds this package to the folders that Dynamo skips."""
    folder = Path(__file__).resolve().parent.as_posix() + "/"
    trace_rules.SKIP_DIRS.append(folder)
    trace_rules._recompile_re()

    def undo() -> None:
        trace_rules.SKIP_DIRS.remove(folder)
        trace_rules._recompile_re()

    return undo
