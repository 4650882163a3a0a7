"""Says what to do where a program asks for gradients of gradients of a compiled function.

AOTAutograd computes none outside of compiled code. It raises where the second backward begins, or, after a backward
that was compiled to write over what is saved, in the first one; there it recommends an option that only leads to the
other error.
"""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.user_lines import source_line


if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE = (
    "torch.compile computes no gradients of gradients outside of compiled code (create_graph=True): take the inner "
    "gradient inside of the compiled function, with torch.func.grad{}"
)


def build(original: Callable[[Any], Any], factory: Any) -> Any:
    """Seam of _AOTDispatchAutogradFunctionFactory.build: errors of such a function say what to do."""
    function = original(factory)
    message = MESSAGE.format(_place(factory.spec.lazy_backward_info))
    function._double_backward = staticmethod(functools.partial(_double_backward, function._double_backward, message))
    return function


def _place(backward: Any) -> str:
    nodes = getattr(getattr(backward, "bw_module", None), "graph", None)
    lines = (source_line(node.stack_trace) for node in (nodes.nodes if nodes is not None else ()) if node.stack_trace)
    line = next(filter(None, lines), "")
    return f" (the compiled code is that of {line})" if line else ""


def _double_backward(original: Callable[..., Any], message: str, *args: Any) -> Any:
    """Run a backward with create_graph=True."""
    try:
        results = original(*args)
    except RuntimeError as error:
        if "donated buffers" in str(error):
            raise RuntimeError(message) from error
        raise
    found = [result.grad_fn for result in results if isinstance(result, torch.Tensor) and result.grad_fn is not None]

    def refuse(gradients: Any) -> None:
        raise RuntimeError(message)

    for node in found[:1]:  # all gradients have the same node
        node.register_prehook(refuse)
    return results
