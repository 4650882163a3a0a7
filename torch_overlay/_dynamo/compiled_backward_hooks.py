"""Has compiled autograd note the streams of the backwards that it copies, and supply them at each call."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch.fx.traceback
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from torch_overlay import config
from torch_overlay._dynamo import backward_tables, compiled_backward, objects
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import node_stream


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule


def autograd_key(original: Callable[[Any], tuple[int, ...]], node: Any) -> tuple[int, ...]:
    table = getattr(node, "_external_objects", None)
    if isinstance(table, objects.Snapshot):
        backward_tables.add(table)
    return original(node)


def copy_backward(
    original: Callable[..., Any], compiler: Any, inputs: Any, saved: Any, tensors: Any, pctx: Any, ctx: Any, *rest: Any
) -> Any:
    """Wrap the copying of one backward graph into compiled autograd's graph: mark the streams of the copied nodes."""
    table = getattr(ctx, "_external_objects", None)
    graph: Graph = compiler.fx_tracer.graph
    before = len(graph.nodes)
    result = original(compiler, inputs, saved, tensors, pctx, ctx, *rest)
    if not (config.streams and isinstance(table, objects.Snapshot)):
        return result
    from torch._dynamo.compiled_autograd import extract_bw_module

    from_end = backward_tables.from_end(table)
    function = ctx._forward_cls
    copies = {n.name: n for n in list(graph.nodes)[before:]}
    compiled_backward.mark(list(copies.values()), from_end)
    times = compiler.aot_id_counter[function._aot_id] - 1
    prefix = f"aot{function._aot_id}" + (f"_{times}" if times else "")
    for value in extract_bw_module(function).graph.find_nodes(op="placeholder"):
        stream = fact_of(value).memory
        if stream:
            compiled_backward.mark_saved(copies[f"{prefix}_{value.name}"], stream, from_end)
    return result


def end_capture(original: Callable[..., Any], compiler: Any, outputs: Any) -> Any:
    """Wrap the end of the capture, which passes the graph to the compiler: write the stream program into it before."""
    compile_graph, found = compiler.compiler_fn, []

    def compile_placed(gm: GraphModule) -> Any:
        found.append((gm, compiled_backward.write_stream_program(gm) if config.streams else ()))
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
    if not config.streams or not any(node_stream(n) for n in module.gm.graph.nodes):
        return original(module, *args)
    with torch.fx.traceback.preserve_node_meta():
        return PropagateUnbackedSymInts(module.gm).run(*module.unflatten_fn(list(args)))
