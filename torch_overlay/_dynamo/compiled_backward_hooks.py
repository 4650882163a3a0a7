"""Has compiled autograd note the streams of the backwards that it copies, and supply them at each call."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch.fx.traceback
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from torch_overlay._dynamo import backward_tables, compiled_backward
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule


def autograd_key(original: Callable[[Any], tuple[int, ...]], node: Any) -> tuple[int, ...]:
    if (table := backward_tables.table_of(node)) is not None:
        backward_tables.add(table)
    return original(node)


def compiler_init(original: Callable[..., None], compiler: Any, *args: Any) -> None:
    """Wrap the constructor of compiled autograd's instance."""
    override(compiler, proxy_call_aot_backward=copy_backward, end_capture=end_capture)
    original(compiler, *args)


def copy_backward(
    original: Callable[..., Any], compiler: Any, inputs: Any, saved: Any, tensors: Any, pctx: Any, ctx: Any, *rest: Any
) -> Any:
    """Wrap the copying of one backward graph into compiled autograd's graph: mark the streams of the copied nodes."""
    graph: Graph = compiler.fx_tracer.graph
    before = len(graph.nodes)
    result = original(compiler, inputs, saved, tensors, pctx, ctx, *rest)
    table = backward_tables.table_of(ctx)
    if not handles_streams() or table is None:
        return result
    from torch._dynamo.compiled_autograd import extract_bw_module

    function = ctx._forward_cls
    copies = {n.name: n for n in list(graph.nodes)[before:]}
    times = compiler.aot_id_counter[function._aot_id] - 1
    prefix = f"aot{function._aot_id}" + (f"_{times}" if times else "")
    backward = extract_bw_module(function).graph
    compiled_backward.mark_backward(
        backward, list(copies.values()), lambda value: copies[f"{prefix}_{value.name}"], table
    )
    return result


def end_capture(original: Callable[..., Any], compiler: Any, outputs: Any) -> Any:
    """Wrap the end of the capture, which passes the graph to the compiler: write the stream program into it before."""
    compile_graph, found = compiler.compiler_fn, []

    def compile_placed(gm: GraphModule) -> Any:
        found.append((gm, compiled_backward.write_stream_program(gm) if handles_streams() else ()))
        return compile_graph(gm)

    compiler.compiler_fn = compile_placed
    try:
        run, compiled = original(compiler, outputs)
    finally:
        compiler.compiler_fn = compile_graph
    ((gm, needed),) = found
    return lambda *args: backward_tables.run(lambda: run(*args), gm, needed), compiled


def run_wrapped_graph(original: Callable[..., Any], module: Any, *args: Any) -> Any:
    """Wrap the run of a wrapped graph: preserve the metadata of its nodes.

    A graph with a list among its inputs, as compiled autograd's is, is wrapped while AOTAutograd traces it, and
    upstream runs a wrapped graph without looking at the metadata of its nodes.
    """
    if not handles_streams() or not any(node_stream(n) for n in module.gm.graph.nodes):
        return original(module, *args)
    with torch.fx.traceback.preserve_node_meta():
        return PropagateUnbackedSymInts(module.gm).run(*module.unflatten_fn(list(args)))
