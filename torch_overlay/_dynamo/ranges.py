"""Traces ranges of NVTX and of torch.profiler.record_function in Dynamo.

While a frame is traced, each range becomes operations of the graph (ops.py). When the graph is complete, `finish`
removes the unwanted ones: pairs and marks. A range that is opened in one graph and closed in another stays, since the
other one may be eager code.

`torch_overlay.config.nvtx` says whether ranges are wanted. Where it is None, they are wanted if a tool is attached to
the process, as Nsight Systems is, or a profiler runs when the function is compiled. Upstream's option
`torch._dynamo.config.capture_profiler_record_function` asks for ranges of record_function.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import Method
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable

from torch_overlay import config
from torch_overlay._dynamo.contexts import NvtxRange, range_enter, range_exit
from torch_overlay._dynamo.ops import NVTX, range_mark, range_pop, range_push, RANGES, RECORD_FUNCTION
from torch_overlay._dynamo.state import expects_streams, handled
from torch_overlay._functorch.streams.fx import has_streams, is_stream_op
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch.fx import Graph


# NVTX's own loader finds a tool by the first variable; Nsight Systems sets both.
_TOOLS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
_NO_DEPTH = -2  # NVTX returns it where no tool counts the depth
_NO_HANDLE = 0


def wants(kind: str) -> bool:
    if config.nvtx is not None:
        return config.nvtx
    profiled = torch._C._autograd._profiler_enabled() or any(name in os.environ for name in _TOOLS)
    return profiled or (kind == RECORD_FUNCTION and torch._dynamo.config.capture_profiler_record_function)


def _message(variable: VariableTracker, *args: VariableTracker, **kwargs: VariableTracker) -> str:
    given = [variable.realize(), *(one.realize() for one in (*args, *kwargs.values()))]
    if all(one.is_python_constant() for one in given):
        text, *rest = (one.as_python_constant() for one in given)
        if not (args or kwargs):
            return str(text)
        return text.format(*rest[: len(args)], **dict(zip(kwargs, rest[len(args) :])))
    if wants(NVTX):
        unimplemented(
            gb_type="profiler range with a name that is known only at run time",
            context=str(variable),
            explanation="A range that stays in the graph has a name that is known when the function is compiled.",
            hints=["Give the range a constant name.", "Leave ranges out: torch_overlay.config.nvtx = False."],
        )
    return "range"


def _push(tx: InstructionTranslatorBase, kind: str, message: str, details: str | None = None) -> None:
    tx.output.create_proxy("call_function", range_push, (kind, message, details), {})


def _pop(tx: InstructionTranslatorBase, kind: str) -> None:
    tx.output.create_proxy("call_function", range_pop, (kind,), {})


class _NvtxRangeVariable(ContextWrappingVariable):
    """Variable of torch.cuda.nvtx.range(message)."""

    def __init__(self, message: str, **kwargs: Any) -> None:
        super().__init__(target_values=[message], **kwargs)

    tp_methods = {"__enter__": Method(range_enter), "__exit__": Method(range_exit)}

    def python_type(self) -> type:
        return NvtxRange

    def enter(self, tx: InstructionTranslatorBase) -> VariableTracker:
        _push(tx, NVTX, self.target_values[0])
        return ConstantVariable.create(None)

    def exit(self, tx: InstructionTranslatorBase, *args: VariableTracker) -> VariableTracker:
        _pop(tx, NVTX)
        return ConstantVariable.create(None)

    def module_name(self) -> str:
        return "torch.cuda.nvtx"

    def fn_name(self) -> str:
        return "range"

    def reconstruct_type(self, codegen: PyCodegen) -> None:
        """Push a callable that returns the context: Note [Graph breaks in stream contexts]."""
        codegen.add_push_null(lambda: codegen.load_import_from("functools", "partial"))
        codegen.load_import_from("torch.cuda.nvtx", "range")
        codegen.append_output(codegen.create_load_const(self.target_values[0]))
        codegen.call_function(2, False)

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.add_push_null(lambda: self.reconstruct_type(codegen))
        codegen.call_function(0, False)


def nvtx_push(function: Any, tx: InstructionTranslatorBase, msg: VariableTracker) -> VariableTracker | None:
    if not expects_streams(tx):
        return None
    _push(tx, NVTX, _message(msg))
    return ConstantVariable.create(_NO_DEPTH)


def nvtx_pop(function: Any, tx: InstructionTranslatorBase) -> VariableTracker | None:
    if not expects_streams(tx):
        return None
    _pop(tx, NVTX)
    return ConstantVariable.create(_NO_DEPTH)


def nvtx_mark(function: Any, tx: InstructionTranslatorBase, msg: VariableTracker) -> VariableTracker | None:
    if not expects_streams(tx):
        return None
    tx.output.create_proxy("call_function", range_mark, (_message(msg),), {})
    return ConstantVariable.create(None)


def nvtx_range(
    function: Any,
    tx: InstructionTranslatorBase,
    msg: VariableTracker,
    *args: VariableTracker,
    **kwargs: VariableTracker,
) -> VariableTracker | None:
    return _NvtxRangeVariable(_message(msg, *args, **kwargs)) if expects_streams(tx) else None


def nvtx_start(function: Any, tx: InstructionTranslatorBase, msg: VariableTracker) -> VariableTracker | None:
    """Trace range_start, whose range any thread may end by its number. A wanted range breaks the graph, as in stock."""
    return None if wants(NVTX) or not expects_streams(tx) else ConstantVariable.create(_NO_HANDLE)


def nvtx_end(function: Any, tx: InstructionTranslatorBase, range_id: VariableTracker) -> VariableTracker | None:
    number = range_id.realize()
    is_left_out = number.is_python_constant() and number.as_python_constant() == _NO_HANDLE
    return ConstantVariable.create(None) if is_left_out and expects_streams(tx) else None


HANDLERS: dict[Callable[..., Any], Callable[..., VariableTracker | None]] = {
    torch.cuda.nvtx.range_push: nvtx_push,
    torch.cuda.nvtx.range_pop: nvtx_pop,
    torch.cuda.nvtx.mark: nvtx_mark,
    torch.cuda.nvtx.range: nvtx_range,
    torch.cuda.nvtx.range_start: nvtx_start,
    torch.cuda.nvtx.range_end: nvtx_end,
}


def decorated(tx: InstructionTranslatorBase, cls: object, args: Any) -> VariableTracker | None:
    """Trace the context of a function that torch.cuda.nvtx.range decorates: contextlib makes it anew at each call."""
    if cls is not contextlib._GeneratorContextManager or len(args) != 3:
        return None
    function, given, named = args
    if getattr(function, "value", None) is not torch.cuda.nvtx.range.__wrapped__:  # type: ignore[attr-defined]
        return None
    return nvtx_range(function, tx, *given.items, **named.keys_as_python_constant())


def finish(graph: Graph) -> None:
    """Remove the unwanted ranges, once all of the graph is known."""
    of_streams = has_streams(graph.nodes, lambda node: is_stream_op(node) and node.target not in RANGES)
    if of_streams:
        _take_over(graph)
    for kind in (NVTX, RECORD_FUNCTION):
        if wants(kind) and (of_streams or kind == NVTX):
            continue
        opened = []
        for node in list(graph.nodes):
            if node.target is range_push and node.args[0] == kind:
                opened.append(node)
            elif node.target is range_pop and node.args[0] == kind and opened:
                graph.erase_node(node)
                graph.erase_node(opened.pop())
            elif node.target is range_mark and kind == NVTX:
                graph.erase_node(node)


def _take_over(graph: Graph) -> None:
    """Replace upstream's operations for record_function, which have no order with launches, by ours."""
    ops = torch.ops.profiler
    for node in list(graph.nodes):
        if node.target is ops._record_function_enter_new:
            ours, arguments = range_push, (RECORD_FUNCTION, *node.args)
        elif node.target is ops._record_function_exit._RecordFunction:
            ours, arguments = range_pop, (RECORD_FUNCTION,)
        else:
            continue
        with graph.inserting_before(node):
            graph.call_function(ours, arguments).meta = dict(node.meta)
    for node in reversed(graph.nodes):
        if node.target in (ops._record_function_exit._RecordFunction, ops._record_function_enter_new):
            graph.erase_node(node)


def create_range(original: Callable[..., Any], func: Any, record_args: Any, record_kwargs: Any, **kwargs: Any) -> Any:
    context = original(func, record_args, record_kwargs, **kwargs)
    override(context, enter=enter_range, exit=exit_range)
    given = {**dict(zip(("name", "args"), record_args)), **record_kwargs}
    if all(one.is_python_constant() for one in given.values()):
        context.overlay_name = {key: one.as_python_constant() for key, one in given.items()}
    return context


def _recorded_name(tx: InstructionTranslatorBase, context: Any) -> dict[str, Any] | None:
    """Return the name of a range of record_function that becomes operations of this module, and not those of Dynamo's
    option.
    """
    is_ours = not torch._dynamo.config.capture_profiler_record_function and handled(tx) and wants(RECORD_FUNCTION)
    return getattr(context, "overlay_name", None) if is_ours else None


def enter_range(original: Callable[..., Any], context: Any, tx: InstructionTranslatorBase) -> Any:
    if (name := _recorded_name(tx, context)) is not None:
        _push(tx, RECORD_FUNCTION, str(name.get("name", "unknown")), name.get("args"))
    return original(context, tx)


def exit_range(original: Callable[..., Any], context: Any, tx: InstructionTranslatorBase, *args: Any) -> Any:
    if _recorded_name(tx, context) is not None:
        _pop(tx, RECORD_FUNCTION)
    return original(context, tx, *args)


def cleanup_graph(original: Callable[[OutputGraph], None], output: OutputGraph) -> None:
    """Wrap the cleanup of a graph: `finish` it after the contexts that a graph break leaves have ended."""
    original(output)
    if handled(output.root_tx):
        finish(output.graph)
