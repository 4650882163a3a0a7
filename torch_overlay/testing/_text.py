"""Graphs and generated wrappers as text that a test can quote."""

from __future__ import annotations

import re
from typing import Any

import torch


def graph(gm: torch.fx.GraphModule) -> str:
    """One node a line: name, type, call, and the stream that the node is placed on (none: the ambient stream)."""
    return "\n".join(_node(n) for n in gm.graph.nodes)


def _node(node: torch.fx.Node) -> str:
    if node.op == "output":
        return f"return {_args(node)}"
    kind = _type(node.meta.get("val"))
    if node.op == "placeholder":
        line = f"{node.name}{kind}"
    elif node.op == "get_attr":
        line = f"{node.name}{kind} = self.{node.target}"
    else:
        line = f"{node.name}{kind} = {_target(node)}({_args(node)})"
    stream = (node.meta.get("custom") or {}).get("stream")
    return line if stream is None else f"{line}  # stream {stream}"


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


def call_bodies(wrapper: str) -> str:
    """The functions that run at each call, without comments, layout assertions, blank lines and outer indentation."""
    lines = []
    for match in _BODY.finditer(wrapper):
        indent = len(match[1])
        lines += [line[indent:].rstrip() for line in match[0].splitlines() if not _NOISE.match(line)]
    return "\n".join(lines) + "\n"
