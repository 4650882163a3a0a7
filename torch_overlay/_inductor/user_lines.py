"""Finds the line of the user's program in a stack trace of FX."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NoReturn, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Node


def is_in_torch(path: str) -> bool:
    """True for a file of torch's own."""
    import torch

    return path.startswith(os.path.dirname(torch.__file__) + os.sep)


def source_line(stack_trace: str) -> str:
    """Return the innermost line of the user's program in a stack trace of FX. Lines of torch, and of the context
    managers that a `with` enters, count only if there are no others."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in ([^\n]+)(?:\n\s*([^\n]+))?', stack_trace)
    if not frames:
        return ""
    mine = [f for f in frames if f[0] != contextlib.__file__ and not is_in_torch(f[0])]
    file, line, _, text = (mine or frames)[-1]
    return f"{file}:{line}: {text.strip()}" if text else f"{file}:{line}"


def refuse_in_cpp(reason: str, origins: Iterable[Node]) -> NoReturn:
    """Raise the error that says why a program has no C++ wrapper, with the first line that is known of these nodes."""
    from torch._inductor.virtualized import V

    line = next(filter(None, (source_line(node.stack_trace or "") for node in origins)), "no line is known")
    wrapper = "AOTInductor" if V.graph.aot_mode else "cpp_wrapper"
    raise NotImplementedError(f"{wrapper} can't compile {reason}, at {line}")


def trace_near(node: Node) -> str:
    """Return the stack trace of an FX node. One that upstream's passes have put in has none: that of the nearest node
    that reads it, or that it reads."""
    near, known = [node], {node}
    for each in near:  # which grows
        if each.stack_trace:
            return each.stack_trace
        more = [other for other in (*each.users, *each.all_input_nodes) if other not in known]
        near += more
        known.update(more)
    return ""
