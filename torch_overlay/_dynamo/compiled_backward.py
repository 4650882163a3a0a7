"""Places the backward graphs that compiled autograd traces on their streams.

Note [Placement under compiled autograd]
Compiled autograd makes one graph of a whole backward pass, into which it copies the backward graphs that AOTAutograd
made, and calls it on the stream of whoever called `backward`. The autograd engine, which knows streams, does not run
the copied operations. So before Dynamo reads the graph, we write into it what the engine would do, as eager code:

- A copied operation is placed by `set_stream` on the stream that it had in its own graph; hooks, sums and accumulation
  of gradients stay on the current stream.
- The side streams wait for the current stream at the beginning and at the end, and the current stream waits for them at
  the end. At the beginning it waits only for the side streams whose memory holds saved values.
- A saved value in a side stream's memory is recorded on the other streams that read it, because compiled autograd drops
  the value at its last use. (Generated code records the streams that read gradients:
  `users_of_results` in `streams.graph_facts`.)

The same graph serves all calls of the same functions, so the actual streams are known only at each call. At each
backward, autograd asks every node for its cache key, in the order in which the nodes run. There each function's table
of stream objects (`objects.Snapshot`) is queued; a call of the graph takes the queue and puts the streams into
attributes of the graph's module, where Dynamo finds them as it finds those of any module. Positions in the queue count
from its end, because a backward that failed while it was traced leaves its tables there.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, TYPE_CHECKING

import torch
import torch.fx.traceback
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.facts import fact_of, NOTHING, replace_fact
from torch_overlay._functorch.streams.fx import (
    BACKWARD,
    has_streams,
    is_stream_op,
    METHODS_OF_EVENTS,
    METHODS_OF_STREAMS,
    node_stream,
    place_on,
    users_of_memory,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.tokens import events_of
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule, Node


# Keys of `meta`. Of a copied operation: a `StreamObject`, the stream that it runs on.
KEY = "compiled_backward_stream"
# Of a copied operation: the events that it waits for. Of an operation on streams and events: its arguments.
EVENTS = "compiled_backward_events"
# Of a saved value: a `StreamObject`, the stream whose memory may hold it.
SAVED = "compiled_backward_memory"


@dataclasses.dataclass(frozen=True)
class StreamObject:
    """Reference to a stream or event: its table's position from the end of the queue, and its number in that table."""

    from_end: int
    index: int

    @property
    def name(self) -> str:
        return f"backward_{self.from_end}_object_{self.index}"


def mark_backward(
    graph: Graph, copies: Sequence[Node], copy_of: Callable[[Node], Node], table: objects.Snapshot
) -> None:
    """Save in `meta` the streams and events of what was copied from a backward graph; Dynamo numbers them anew.
    `copies` are its operations, `copy_of` returns the copy of an input, and `table` has the objects of the forward, and
    is queued.
    """
    from_end = position_of(table)
    for value in graph.find_nodes(op="placeholder"):
        if stream := fact_of(value).memory:
            copy_of(value).meta[SAVED] = StreamObject(from_end, stream)
    for node in copies:
        if stream := node_stream(node):
            node.meta[KEY] = StreamObject(from_end, stream)
        events = [StreamObject(from_end, event) for event in sorted(events_of(fact_of(node).after or ()))]
        if events:
            node.meta[EVENTS] = events
        if is_stream_op(node):
            node.meta[EVENTS] = [StreamObject(from_end, a) if isinstance(a, int) else a for a in node.args]
        # The new graph has no forward and no engine, so drop the facts about either.
        node.meta.pop("partitioner_tag", None)
        node.meta.pop(BACKWARD, None)
        place_on(node, CALLERS_STREAM)
        replace_fact(node, NOTHING)


_METHODS = {**METHODS_OF_EVENTS, **METHODS_OF_STREAMS, "record_stream": "record_stream"}


class _Writer:
    """Writes the stream program of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.nodes = list(self.graph.nodes)
        self.begin = next(n for n in self.nodes if n.op != "placeholder")
        self.fetched: dict[StreamObject, Node] = {}
        self.sides = list(dict.fromkeys(n.meta[KEY] for n in self.nodes if KEY in n.meta))
        self.saved_on = list(dict.fromkeys(n.meta[SAVED] for n in self.nodes if SAVED in n.meta))
        with self.graph.inserting_before(self.begin):
            self.current = self.graph.call_function(torch.cuda.current_stream)

    def fetch(self, found: StreamObject | None) -> Node:
        if found is None or found.index == CALLERS_STREAM:
            return self.current
        if found not in self.fetched:
            setattr(self.gm, found.name, None)
            with self.graph.inserting_before(self.begin):
                self.fetched[found] = self.graph.create_node("get_attr", found.name)
        return self.fetched[found]

    def call(self, method: str, *args: Any) -> None:
        self.graph.call_method(method, tuple(self.fetch(a) if isinstance(a, StreamObject) else a for a in args))

    def write(self) -> tuple[StreamObject, ...]:
        """Write the program; return the objects that each call of the graph must supply."""
        with self.graph.inserting_before(self.begin):
            for saved_on in self.saved_on:
                self.call("wait_stream", self.current, saved_on)
            for side in self.sides:
                self.call("wait_stream", side, self.current)
        self.place()
        self.record_streams()
        (output,) = self.graph.find_nodes(op="output")
        with self.graph.inserting_before(output):
            for side in self.sides:
                self.call("wait_stream", self.current, side)
            for side in self.sides:
                self.call("wait_stream", side, self.current)
        self.gm.recompile()
        return tuple(self.fetched)

    def place(self) -> None:
        here: StreamObject | None = None
        for node in self.nodes:
            if node.op not in ("call_function", "call_method", "call_module", "output"):
                continue
            there = node.meta.get(KEY)
            with self.graph.inserting_before(node):
                if is_stream_op(node):
                    self.rewrite(node)
                    continue
                if there != here:
                    self.graph.call_function(torch.cuda.set_stream, (self.fetch(there),))
                here = there
                for event in node.meta.get(EVENTS, ()):
                    self.call("wait_event", self.fetch(there), event)

    def rewrite(self, node: Node) -> None:
        """Replace a user's operation on streams and events in a backward by the call that eager code makes."""
        if node.target is torch.ops.streams.synchronize_device.default:
            return
        if (method := _METHODS.get(node.target._opname)) is None:
            raise NotImplementedError(
                f"compiled autograd: {node.target} in the backward of a compiled function. Ask streams and events from "
                "a hook, or run this backward without compiled autograd."
            )
        self.call(method, *node.meta[EVENTS])
        self.graph.erase_node(node)

    def record_streams(self) -> None:
        for value in self.nodes:
            saved_on = value.meta.get(SAVED)
            if saved_on is None:
                continue
            streams = dict.fromkeys(user.meta.get(KEY) for user in users_of_memory(value))
            streams.pop(saved_on, None)
            with self.graph.inserting_after(value):
                for stream in streams:
                    self.call("record_stream", value, self.fetch(stream))


def autograd_key(original: Callable[[Any], tuple[int, ...]], node: Any) -> tuple[int, ...]:
    if (table := table_of(node)) is not None:
        queue_table(table)
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
    table = table_of(ctx)
    if not handles_streams() or table is None:
        return result
    from torch._dynamo.compiled_autograd import extract_bw_module

    function = ctx._forward_cls
    copies = {n.name: n for n in list(graph.nodes)[before:]}
    times = compiler.aot_id_counter[function._aot_id] - 1
    prefix = f"aot{function._aot_id}" + (f"_{times}" if times else "")
    backward = extract_bw_module(function).graph
    mark_backward(backward, list(copies.values()), lambda value: copies[f"{prefix}_{value.name}"], table)
    return result


def end_capture(original: Callable[..., Any], compiler: Any, outputs: Any) -> Any:
    """Wrap the end of the capture, which passes the graph to the compiler: write the stream program into it before."""
    compile_graph, found = compiler.compiler_fn, []

    def compile_placed(gm: GraphModule) -> Any:
        is_marked = any(key in n.meta for n in gm.graph.nodes for key in (KEY, SAVED, EVENTS))
        found.append((gm, _Writer(gm).write() if is_marked and handles_streams() else ()))
        return compile_graph(gm)

    compiler.compiler_fn = compile_placed
    try:
        run, compiled = original(compiler, outputs)
    finally:
        compiler.compiler_fn = compile_graph
    ((gm, needed),) = found
    return lambda *args: run_backward(lambda: run(*args), gm, needed), compiled


def run_wrapped_graph(original: Callable[..., Any], module: Any, *args: Any) -> Any:
    """Wrap the run of a wrapped graph: preserve the metadata of its nodes.

    A graph with a list among its inputs, as compiled autograd's is, is wrapped while AOTAutograd traces it, and
    upstream runs a wrapped graph without looking at the metadata of its nodes.
    """
    if not handles_streams() or not has_streams(module.gm.graph.nodes, None):
        return original(module, *args)
    with torch.fx.traceback.preserve_node_meta():
        return PropagateUnbackedSymInts(module.gm).run(*module.unflatten_fn(list(args)))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.queue: list[objects.Snapshot] = []  # of its next backward; tables of a backward that failed come first


thread = _Thread()


def table_of(ctx: Any) -> objects.Snapshot | None:
    """Return the table that the forward of a compiled function saved with its autograd node; None for other nodes."""
    table = getattr(ctx, "_external_objects", None)
    return table if isinstance(table, objects.Snapshot) else None


def queue_table(table: objects.Snapshot) -> None:
    """Queue a table; one that is queued already moves to the end."""
    thread.queue = [*(t for t in thread.queue if t is not table), table]


def position_of(table: objects.Snapshot) -> int:
    """Return the position of a queued table, 1 for the last one."""
    return next(i for i, t in enumerate(reversed(thread.queue), 1) if t is table)


def run_backward(call: Callable[[], Any], gm: GraphModule, needed: Sequence[StreamObject]) -> Any:
    """Call the graph of a backward, with the streams and events that it needs of the tables that were queued for it."""
    tables, thread.queue = thread.queue, []
    if not tables:
        return call()
    for found in needed:
        setattr(gm, found.name, tables[-found.from_end].objects[found.index])
    try:
        return objects.run_after_forwards([table.objects[0] for table in tables], call)
    finally:
        for found in needed:
            setattr(gm, found.name, None)
