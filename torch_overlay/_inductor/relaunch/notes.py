"""Notes on compiled code: what only its FX graph says, and what Inductor splits off from CUDA graphs, and why. The FX
graph is not available later, when the code is taken from a cache: the notes are pickled with it.

With the notes, `describe` tells a runner, and refusals, the facts of compiled code, or of a partition of it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from torch_overlay._functorch.streams.ids import index_now, written_index
from torch_overlay._inductor.notes import GraphNotes
from torch_overlay._inductor.relaunch import attention_seeds, conditions, split_off
from torch_overlay._inductor.relaunch.capture.culprit import name_of
from torch_overlay._inductor.relaunch.causes import Cause, CodeFacts, COMMUNICATION, of_partition
from torch_overlay._inductor.relaunch.rewrites.graph import current, Resident, Rewrite, Rewrites
from torch_overlay._inductor.user_lines import source_line, trace_near


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._inductor.output_code import CompiledFxGraph


CONTROL_FLOW = ("cond", "switch", "while_loop", "while_loop_stack_output", "scan")
OF_THE_HOST = ("streams_offload::slab.default", "streams_offload::in_use.default")  # offload's memory, and its notes
LAUNCH_NOTHING = ("split-streams", "split-zeros")
SMALL = "fewer kernels than torch._inductor.config.triton.cudagraph_min_partition_size"


@dataclass(frozen=True)
class SplitOff(Cause):
    """Why one operation is between graphs."""

    kernels: int


class Partitions(NamedTuple):
    """The number of kernels of each partition that gets a graph, in order, with the line of the first, and the names of
    the symbols that are its last inputs; and what is split off. Kernels are counted in generated code, where each call
    of a library or a custom operator is one."""

    graphs: tuple[tuple[int, str, tuple[str, ...]], ...] = ()
    split_off: tuple[SplitOff, ...] = ()


class CompiledNotes(NamedTuple):
    """Notes on compiled code (`CompiledFxGraph`)."""

    visible_outputs: tuple[int, ...] | None = None  # positions of the outputs that the user sees, if that is known
    partitions: Partitions = Partitions()
    # Positions of the inputs that are numbers on which no size depends: of the code, then of each partition.
    numbers: tuple[tuple[int, ...], ...] = ((),)
    rewrites: Rewrites = Rewrites()  # of the FX graph, before it was compiled
    owners: tuple[int | None, ...] = ()  # for each result, the stream whose memory it is: `streams.graph_facts`
    donated: tuple[int, ...] = ()  # positions of the inputs of a backward that it may write over

    def put(self, compiled: Any) -> None:
        """Put them on the code, without types: what a cache has of it can be read where our modules are not."""
        compiled.overlay_notes = _plain(self)

    @classmethod
    def find(cls, compiled: Any) -> CompiledNotes | None:
        """Return the notes; None for code that was compiled without them."""
        if (plain := getattr(compiled, "overlay_notes", None)) is None:
            return None
        visible, (graphs, split_off), numbers, (made, resident), owners, donated = plain
        partitions = Partitions(graphs, tuple(SplitOff(*row) for row in split_off))
        rewrites = Rewrites(tuple(Rewrite(*row) for row in made), tuple(Resident(*row) for row in resident))
        return cls(visible, partitions, numbers, rewrites, owners, donated)

    @classmethod
    def of(cls, compiled: Any) -> CompiledNotes:
        return cls.find(compiled) or cls()


def _plain(value: Any) -> Any:
    value = astuple(value) if isinstance(value, SplitOff) else value
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def graph_partitions(graph: Any) -> Partitions:
    """Return the notes of a graph that Inductor has generated code for."""
    found = GraphNotes.of(graph).partitions
    if found is None:  # it isn't partitioned
        scheduler = getattr(graph, "scheduler", None)
        found = Partitions() if scheduler is None else Partitions(((*_counted(scheduler.nodes), ()),))
    return found


def note_partitions(graph: Any, scheduler: Any, partitions: Sequence[Any], signatures: Sequence[Any]) -> None:
    """Note the partitions of a graph for `graph_partitions`, when the scheduler has made them."""
    counted, rows = [], []
    for partition, signature in zip(partitions, signatures):
        if signature.skip_cudagraph:
            rows += [_why(scheduler, node) for node in partition if _launches(node)]
        else:
            counted.append((*_counted(partition), tuple(symbol.name for symbol in signature.symbol_inputs)))
    GraphNotes.of(graph).partitions = Partitions(tuple(counted), tuple(rows))


def _counted(nodes: Sequence[Any]) -> tuple[int, str]:
    launched = list(filter(_launches, nodes))
    return len(launched), next(filter(None, map(_line_of, launched)), "")


def _launches(node: Any) -> bool:
    """True if generated code launches something for a node of the schedule: not for memory that nothing fills, nor for
    one of several results of an operator, nor for a number that is read of host memory, nor for `OF_THE_HOST`."""
    from torch._inductor import ir
    from torch._inductor.scheduler import NopKernelSchedulerNode

    if (overload := getattr(node.node, "op_overload", None)) is not None and name_of(overload) in OF_THE_HOST:
        return False
    if isinstance(node.node, ir.DynamicScalar):
        read: Any = node.node.inputs[0]
        return read.get_device().type != "cpu"
    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, (ir.MultiOutput, ir.AssertScalar))


def _why(scheduler: Any, node: Any) -> SplitOff:
    reason = scheduler.should_partition(node) or SMALL
    code = of_partition(reason)
    fx_node = getattr(node.node, "fx_node", None)
    overload = getattr(node.node, "op_overload", None) or getattr(fx_node, "target", None)
    operator = name_of(overload) if overload is not None else ""
    if fx_node is not None and is_control_flow(fx_node) and reason != SMALL:
        code, reason = "split-control-flow", f"control flow: {operator}"
        if operator == "cond":
            reason = f"{reason}, for {conditions.why_not(fx_node) or 'the program has streams of its own'}"
    elif operator.startswith("streams::"):
        code = "split-streams"
    elif code == "split-unsafe":
        if operator in split_off.failed():
            code, reason = "split-failed", f"{operator} {split_off.failed()[operator]}"
        elif getattr(overload, "namespace", None) in COMMUNICATION:
            code, reason = "split-collective", f"a collective: {operator}"
    if operator and operator not in reason:
        reason = f"{reason} ({overload})"
    return SplitOff.of(code, reason, operator=operator, line=_line_of(node), kernels=code not in LAUNCH_NOTHING)


def _line_of(node: Any) -> str:
    """Return the user's line of a node of the schedule. A kernel has the line of its last operation."""
    found = []
    for each in node.get_nodes():
        if (one := getattr(each.node, "fx_node", None)) is not None:
            found.append(one)
        elif each.node is not None:
            found += sorted(each.node.get_origins())  # in the order of the FX graph
    traces = [trace for origin in found if (trace := origin.stack_trace)] or list(map(trace_near, found))
    return source_line(traces[-1]) if traces else ""


def is_control_flow(node: Any) -> bool:
    """True if the host decides by a tensor what a node of an FX graph launches."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in CONTROL_FLOW


def is_unsafe(node: Any) -> bool:
    """True if an FX node can't be in a graph for a reason that is ours: a collective (`policy`, Note [Collectives]),
    control flow, attention that returns its seeds, or an operator in which a capture failed."""
    from torch._inductor.virtualized import V

    return (
        getattr(node.target, "namespace", None) in COMMUNICATION
        or (is_control_flow(node) and not conditions.is_chosen_by_device(node))
        or attention_seeds.are_returned(node, V.graph.user_visible_output_strides)
        or (bool(split_off.failed()) and name_of(node.target) in split_off.failed())
    )


def give_back_graphs(graph: Any) -> None:
    """Undo that control flow has just taken CUDA graphs from the whole code, where it is split off alone, or the device
    chooses."""
    import torch._inductor.config as inductor_config

    is_taken = (graph.disable_cudagraphs_reason or "").startswith("control flow operator")
    if is_taken and (inductor_config.graph_partition or conditions.is_chosen_by_device(graph.current_node)):
        graph.disable_cudagraphs_reason = None


def note(compiled: Any, graph: Any, gm: Any) -> None:
    """Put the notes on compiled code. `graph`: Inductor's graph, whose code is generated; `gm`: the FX graph that it
    was lowered from."""
    visible = tuple(gm.graph.output_node().meta.get("user_visible_output_idxs", ()))
    found = graph_partitions(graph)
    owners = GraphNotes.of(graph).owners
    CompiledNotes(visible, found, free_numbers(gm, found), current.value, owners, _donated(graph)).put(compiled)


def _donated(graph: Any) -> tuple[int, ...]:
    from torch._inductor.ir import DonatedBuffer

    given = [graph.graph_inputs_original.get(name) for name in graph.graph_input_names]
    return tuple([i for i, buffer in enumerate(given) if isinstance(buffer, DonatedBuffer)])


def numbers_of(compiled: Any, partition: int | None) -> tuple[int, ...]:
    """Return the positions of the numbers that no size depends on, of the code or of one partition."""
    whole, *others = CompiledNotes.of(compiled).numbers
    if partition is None:
        return whole
    return others[partition] if partition < len(others) else ()


def first_saved(compiled: Any) -> int | None:
    """Return the number of a forward's first output that is saved for the backward; None if it isn't known. Without
    notes, AOTAutograd knows it while it compiles, not when the code comes from its cache."""
    visible = CompiledNotes.of(compiled).visible_outputs
    if visible is not None:
        return max(visible) + 1 if visible else None
    context = torch._guards.TracingContext.try_get()
    return None if context is None or context.fw_metadata is None else context.fw_metadata.num_forward


def free_numbers(gm: Any, noted: Partitions) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the inputs that are integers on which no tensor's size or stride depends: those of the
    graph, then those of each partition, which count from the end. Offsets don't matter here: where generated code makes
    a view, its offset is computed from the number in sight, and an input's is in its address."""
    in_shapes: set[str] = set()
    for module in gm.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
            for shape in [dims for tensor in tensors for dims in (tensor.size(), tensor.stride())]:
                in_shapes.update(map(str, free_symbols(shape)))
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    names = [str(v.node.expr) if isinstance(v, torch.SymInt) and v.node.expr.is_Symbol else None for v in values]

    def free(symbols: Sequence[str | None]) -> Iterator[int]:
        return (k for k, symbol in enumerate(symbols) if symbol is not None and symbol not in in_shapes)

    of_partitions = [tuple(k - len(symbols) for k in free(symbols)) for _, _, symbols in noted.graphs]
    return tuple(free(names)), *of_partitions


def describe(
    graph: Any,
    static_input_idxs: Sequence[int],
    *,
    device_index: int,
    is_backward: bool,
    is_inference: bool,
    stack_traces: Sequence[str | None] = (),
    placeholders: Sequence[Any] = (),
    mutated_input_idxs: Sequence[int] = (),
    partition: int | None = None,
    inputs: Sequence[int | None] | None = None,
    **_: Any,
) -> CodeFacts:
    """Describe a graph, or the partition of it that has this number, with the graph's numbers of its inputs. The graph
    is unknown to a policy that is called by another one."""
    kind, name = _named(is_backward, is_inference)
    maps = getattr(graph, "partition_maps", None) or ()
    if partition is not None and len(maps) > 1:
        name += f", partition {partition}"
    written_over = static_input_idxs if is_backward else ()  # what was saved, unless notes say which of it
    if (found := CompiledNotes.find(graph)) is not None:
        written_over = [i for i, k in enumerate(inputs) if k in found.donated] if inputs is not None else found.donated
    return CodeFacts(
        name=name,
        device=index_now(written_index(device_index)),  # that of this rank, whichever compiled the code
        static_inputs=tuple(static_input_idxs),
        mutated_inputs=tuple(sorted({*mutated_input_idxs, *written_over})),
        saved_outputs=_saved(graph, partition, len(stack_traces)) if kind == "forward" else frozenset(),
        is_backward=is_backward,
        source=_first_kernel(graph, partition or 0) or _first_line(placeholders, stack_traces),
        compile_id=None if found is None else _compile_id(),
        numbers=frozenset(numbers_of(graph, partition)),
    )


def describe_partition(
    graph: CompiledFxGraph,
    number: int,
    static_input_idxs: Sequence[int],
    *,
    stack_traces: Sequence[str | None] = (),
    placeholders: Sequence[Any] = (),
    mutated_input_idxs: Sequence[int] = (),
    **kwargs: Any,
) -> CodeFacts:
    assert graph.partition_maps is not None
    partition = graph.partition_maps[number]
    inputs = partition.input_index_mapping
    return describe(
        graph,
        [i for i, k in enumerate(inputs) if k in static_input_idxs],
        stack_traces=[stack_traces[among[0]] if among else None for among in partition.output_index_mapping],
        placeholders=[placeholders[k] for k in inputs if k is not None],
        # None: a buffer that other code of the graph has made, which the partition may write to.
        mutated_input_idxs=[i for i, k in enumerate(inputs) if k is None or k in mutated_input_idxs],
        partition=number,
        inputs=inputs,
        **kwargs,
    )


def _first_kernel(graph: Any, number: int) -> str:
    graphs = CompiledNotes.of(graph).partitions.graphs
    return graphs[number][1] if number < len(graphs) else ""


def describe_whole(compiled: Any) -> CodeFacts:
    """Describe code that Inductor makes no graph of, for a refusal."""
    settings, info = compiled.fx_kwargs, compiled.cudagraph_info
    is_backward = bool(settings.get("is_backward"))
    _, name = _named(is_backward, bool(settings.get("is_inference")))
    source = source_line((compiled.disabled_cudagraphs_reason or "").partition("Found from")[2])
    if not source and info is not None:
        source = _first_line(info.placeholders, info.stack_traces or ())
    device = index_now(written_index(next(iter(compiled.device_idxs), 0)))
    return CodeFacts(name, device, is_backward=is_backward, source=source, compile_id=_compile_id())


def _named(is_backward: bool, is_inference: bool) -> tuple[str, str]:
    kind = "backward" if is_backward else "inference" if is_inference else "forward"
    return kind, f"{kind} of {compiled_frame()}"


def _compile_id() -> Any:
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def compiled_frame() -> str:
    return f"compiled frame {_compile_id() or '?'}"


def _first_line(placeholders: Sequence[Any], stack_traces: Sequence[str | None]) -> str:
    traces = [t for p in placeholders for u in p.users if (t := u.stack_trace)] + [t for t in stack_traces if t]
    return source_line(traces[0]) if traces else ""


def _saved(graph: Any, partition: int | None, outputs: int) -> frozenset[int]:
    """Return the outputs of a forward that are saved for the backward: those after the outputs that the user sees. An
    output of a partition that only the next partition reads is not among them."""
    first = first_saved(graph)
    if first is None:
        return frozenset()
    if partition is None:
        return frozenset(range(first, outputs))
    mapping = enumerate(graph.partition_maps[partition].output_index_mapping)
    return frozenset(i for i, among in mapping if among and min(among) >= first)
