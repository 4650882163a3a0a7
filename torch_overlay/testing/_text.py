"""Prints graphs and generated wrappers as text that a test can quote."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import torch

from torch_overlay._inductor.kernel_places import module_of


# Directories whose frames are not the user's.
TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a graph as text, its stream (None: the caller's), and the user's line that it comes from."""

    text: str
    stream: int | None
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        return self.text if self.stream is None else f"{self.text}  # stream {self.stream}"


def nodes(gm: torch.fx.GraphModule) -> tuple[Node, ...]:
    return tuple(Node(_node(n), (n.meta.get("custom") or {}).get("stream"), *_user_line(n)) for n in gm.graph.nodes)


def _user_line(node: torch.fx.Node) -> tuple[str, int, str]:
    """Return file, line and code of the user's. If a module of torch is compiled, which no line of the user's calls,
    the code is the path and the class of the node's module.
    """
    file, line, code = innermost_frame(node.stack_trace or "")
    if file and not file.startswith(TORCH):
        return file, line, code
    path, kind = module_of(node)
    path = path.partition(".")[2]  # without the name that torch's own caller has for the whole
    return ("", 0, f"{path} ({kind})" if path else kind) if kind else (file, line, code)


def line_of(node: torch.fx.Node) -> str:
    """Return the user's line of a node as "file:number: text", or the path of its module."""
    return as_line(*_user_line(node))


def as_line(file: str, line: int, code: str) -> str:
    """Format a source line as "file:number: text", or as its text alone if no file is known."""
    return f"{os.path.basename(file)}:{line}: {code}" if file else code


def innermost_frame(stack_trace: str) -> tuple[str, int, str]:
    """Return file, line and code of the innermost frame outside of torch; if all are inside, of the innermost one."""
    frames = re.findall(r'File "(.*)", line (\d+).*\n\s*(.*)', stack_trace)
    frames = [f for f in frames if not f[0].startswith(TORCH)] or frames
    return (frames[-1][0], int(frames[-1][1]), frames[-1][2].strip()) if frames else ("", 0, "")


def _node(node: torch.fx.Node) -> str:
    if node.op == "output":
        return f"return {_args(node)}"
    kind = _type(node.meta.get("val"))
    if node.op == "placeholder":
        return f"{node.name}{kind}"
    if node.op == "get_attr":
        return f"{node.name}{kind} = self.{node.target}"
    return f"{node.name}{kind} = {_target(node)}({_args(node)})"


def _target(node: torch.fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _args(node: torch.fx.Node) -> str:
    keywords = [f"{k}={v}" for k, v in node.kwargs.items()]
    return ", ".join([str(a) for a in node.args] + keywords)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = torch.utils._dtype_abbrs.dtype_abbrs[value.dtype]
        device = "" if value.device.type == "cuda" and not value.device.index else f" {value.device}"
        return f": {dtype}{[*value.shape]}{device}".replace("'", "")
    return "" if value is None or isinstance(value, tuple | list) else f": {type(value).__name__}"


_BODY = re.compile(r"^( *)def (?:call|partition_\d+)\(.*?\):\n((?:\1 +.*\n|\s*\n)*)", re.MULTILINE)
_NOISE = re.compile(r"^\s*(#.*|assert_(size_stride|alignment)\w*\(.*|\"\"\".*)?$")


_REGION = re.compile(r"^_\w+ = region\(\n(?:    .*\n)*\)$", re.MULTILINE)


def call_bodies(wrapper: str) -> str:
    """Return the functions that run at each call, without comments, layout assertions, blank lines and outer
    indentation, with the definitions of their regions before them.
    """
    lines = [line for match in _REGION.finditer(wrapper) for line in match[0].splitlines()]
    for match in _BODY.finditer(wrapper):
        indent = len(match[1])
        lines += [line[indent:].rstrip() for line in match[0].splitlines() if not _NOISE.match(line)]
    return "\n".join(lines) + "\n"
