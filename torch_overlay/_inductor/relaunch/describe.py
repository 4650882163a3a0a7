"""Describes compiled code, or a partition of it, for its runner and for refusals."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.streams.ids import index_now, written_index
from torch_overlay._inductor.relaunch import notes
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.user_lines import source_line


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._inductor.output_code import CompiledFxGraph


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
    if (found := notes.CompiledNotes.find(graph)) is not None:
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
        numbers=frozenset(notes.numbers_of(graph, partition)),
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
    graphs = notes.CompiledNotes.of(graph).partitions.graphs
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
    first = notes.first_saved(graph)
    if first is None:
        return frozenset()
    if partition is None:
        return frozenset(range(first, outputs))
    mapping = enumerate(graph.partition_maps[partition].output_index_mapping)
    return frozenset(i for i, among in mapping if among and min(among) >= first)
