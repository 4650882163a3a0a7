"""Write into generated code which line and module of the user's each kernel comes from, and find it there.

    # Kernel of model.py:41, layers.0.mlp

Upstream keeps a map of lines beside the code, but none for the functions of partitions, which are those that become
graphs. Where the option `nvtx` is True the code has such comments (the option is in the key of the caches).
"""

from __future__ import annotations

import linecache
import os
import re
from typing import Any, TYPE_CHECKING

from torch._inductor.utils import LineContext

from torch_overlay._inductor.user_lines import source_line


if TYPE_CHECKING:
    import torch

MARK = "# Kernel of "


def mark(lines: list[Any]) -> list[Any]:
    """Put a comment after each mark of a wrapper that says from which node the following lines come."""
    out: list[Any] = []
    for line in lines:
        out.append(line)
        if isinstance(line, LineContext) and (place := place_of(line.context)):
            out.append(f"{MARK}{place}")
    return out


def place_of(node: torch.fx.Node) -> str:
    """Return "model.py:41, layers.0.mlp"; without the module if there is none, and empty if the line is not known."""
    line = os.path.basename(source_line(getattr(node, "stack_trace", None) or "").partition(": ")[0])
    path, _ = module_of(node) if line else ("", "")
    return f"{line}, {path}" if path else line


def module_of(node: torch.fx.Node) -> tuple[str, str]:
    """Return path and class of the innermost module that a node comes from, "layers.0" and "Linear"; empty without."""
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = next(reversed(modules.values()), ("", ""))
    path = re.sub(r"^[LG]\['(\w+)'\]", r"\1", str(path)).removeprefix("self").lstrip(".")  # L['self'].layers.0
    return path, getattr(kind, "__name__", str(kind))


def place_at(path: str, line: int) -> str:
    """Return the place that stands above a line of generated code, in the same function; empty if there is none."""
    for text in reversed(linecache.getlines(path)[:line]):
        text = text.strip()
        if text.startswith("def "):
            break
        if text.startswith(MARK):
            return text.removeprefix(MARK)
    return ""
