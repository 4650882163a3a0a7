"""Decides which compiled code gets a relaunched graph, and reports why other code gets none.

`config.cudagraphs` chooses between our graphs, upstream's trees, and none; Inductor asks through the seams below. The
choice is made when a forward is compiled, and its backward uses the same one: autograd may compile the backward much
later, in another thread, where the option has another value.

Note [Nobody is left without a graph or a reason]
Code that asked for a graph is followed through the constructor of the compiled code and its `post_compile`, where
Inductor may decide against graphs, to a `Runner`, which makes a graph or refuses. A decision of Inductor's counts as a
refusal like ours, whoever logs it. Two kinds of code need no graph, and get no refusal: code without a kernel, and code
for the host. Inductor has one switch for a forward and its backward, because trees need graphs of both or of neither.
Our graphs are independent: the switch is turned on again when the forward is refused, so that the backward gets its own
decision.

Note [Collectives]
A kernel of a communication library finds its buffers in memory that the library keeps, not in its parameters, and the
library may register a buffer with its peers when it sees a capture. The proof can't see such addresses. So collectives
are split off, between graphs: they run as compiled, and their order across ranks is that of the program. Where code
can't be split, or an operator of the user's contains a collective, there is no graph.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any, TYPE_CHECKING

from torch_overlay import config
from torch_overlay._functorch.streams.ids import index_now, written_index
from torch_overlay._inductor.relaunch import coverage, partitions, split_off
from torch_overlay._inductor.relaunch.partitions import Partitions
from torch_overlay._inductor.relaunch.refusals import Code, refuse, Refused, source_line
from torch_overlay._inductor.relaunch.rewrites import graph as rewrites
from torch_overlay._inductor.relaunch.rewrites.graph import Rewrites
from torch_overlay._inductor.relaunch.rewrites.resident import Residents
from torch_overlay._inductor.streams.saved_memory import owners_of, settle_owners


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay._inductor.relaunch.rewrites.graph import Rewrite

# ---- what Inductor compiles


class _Compiling(threading.local):
    mode: str | None = None
    graph: Any = None
    partition = 0
    record: Any = None  # coverage.CompiledCode of the graph


_compiling = _Compiling()


def chosen_mode(device_box: Any) -> str:
    """Return the value of `config.cudagraphs` at the forward's compilation. It is kept on the device box, which a
    forward and its backward share."""
    mode = getattr(device_box, "overlay_cudagraphs", None) or config.cudagraphs
    if device_box is not None:
        device_box.overlay_cudagraphs = mode
    return mode


@contextlib.contextmanager
def compiling(graph: Any, mode: str) -> Iterator[None]:
    before = _compiling.mode, _compiling.graph, _compiling.partition, _compiling.record
    _compiling.mode, _compiling.graph, _compiling.partition, _compiling.record = mode, graph, 0, None
    try:
        yield
    finally:
        _compiling.mode, _compiling.graph, _compiling.partition, _compiling.record = before


def post_compile(
    original: Callable[..., None],
    compiled: Any,
    example_inputs: Sequence[Any],
    constants: Any,
    graph_kwargs: dict[str, Any],
) -> None:
    """Seam of CompiledFxGraph.post_compile: wrap code that was just compiled, or comes from a cache, in graphs, and in
    what copies to the device the inputs that it was rewritten to take there. Note for its backward whose memory it
    saves."""
    found = Rewrites.read(getattr(compiled, "_overlay_rewrites", ()))
    residents = Residents(found.resident)
    finish = functools.partial(original, compiled, example_inputs, constants, graph_kwargs)
    _wrap_in_graphs(finish, compiled, graph_kwargs, found.made, residents)
    settle_owners(getattr(compiled, "_overlay_owners", ()))
    if residents.rows:
        compiled.current_callable = residents.around(compiled.current_callable)


def _wrap_in_graphs(
    finish: Callable[[], None],
    compiled: Any,
    graph_kwargs: dict[str, Any],
    made: Sequence[Rewrite],
    residents: Residents,
) -> None:
    import torch._inductor.config as inductor_config

    wanted: Any = graph_kwargs.get("cudagraphs")
    unasked = not wanted and not getattr(wanted, "overlay_wanted", False)
    if unasked or inductor_config.cudagraph_policy is not None:
        finish()
        return
    mode = chosen_mode(graph_kwargs.get("boxed_forward_device_index"))
    if mode == "off":
        type(wanted).disable(wanted)
    with compiling(compiled, mode):
        if mode == "relaunch":
            notes = Partitions.read(compiled._overlay_partitions)
            _compiling.record = coverage.CompiledCode(describe_whole(compiled), notes, made, residents)
        finish()
        if mode == "relaunch" and not wanted:
            wanted.value = True
            if (found := why_not(compiled)) is not None:
                compiled.current_callable = _compiling.record.without_graph(compiled.current_callable, *found)
                refuse(Refused(_compiling.record.code, *found))


# What the user can change, by a phrase of Inductor's message.
ADVICE = {
    "incompatible op": "torch._inductor.config.graph_partition = True splits it off",
    "storage mutation": "take set_() and resize_() of an input out of the compiled function",
    "mutated inputs": "torch._inductor.config.triton.cudagraph_support_input_mutation = True allows it",
    "multiple devices": "compile the code of each device by itself",
    "non-Tensor inputs": "pass tensors",
}


def why_not(compiled: Any) -> tuple[str, str] | None:
    """Return the reason code and text for Inductor making no graph of code that asked for one; None if the code has
    nothing to launch."""
    from torch._inductor.utils import is_gpu

    if compiled.kernel_free_cudagraph or not any(map(is_gpu, compiled.device_types)):
        return None
    said = compiled.disabled_cudagraphs_reason or ", ".join(
        getattr(compiled.cudagraph_info, "cudagraph_fail_reasons", None) or ()
    )
    if said:
        text = said.partition("Found from")[0].strip().rstrip(".")
        for start in ("skipping cudagraphs due to ", "disabling cudagraphs due to "):
            text = text.removeprefix(start)
        advice = [advice for about, advice in ADVICE.items() if about in text]
        return "inductor", "; ".join([text, *advice])
    if compiled.partition_maps is not None and not compiled.partition_maps:
        rows = Partitions.read(compiled._overlay_partitions).split_off
        if rows and all(row.code == "split-streams" for row in rows):
            return None
        reasons = "; ".join(dict.fromkeys(row.reason for row in rows))
        message = f"all of it is split off: {reasons or 'Inductor does not say why'}"
        return "split", f"{message}. What stands between such operations in one function would get a graph"
    return "inductor", "Inductor disabled it for this code"


def maybe_handle_backward_generation(original: Callable[..., None], compiled_graph: Any, device_box: Any) -> None:
    """Seam: call the original for trees alone, since only trees have generations."""
    if (_compiling.mode or chosen_mode(device_box)) == "trees":
        original(compiled_graph, device_box)


def reset(original: Callable[[], None]) -> None:
    """Seam of the function that torch._dynamo.reset() calls to drop the graphs of the process. Our runners drop theirs
    explicitly, since compiled code may still be referenced: by a backward yet to run, or by Dynamo after a graph break.
    """
    original()
    runner = sys.modules.get("torch_overlay._inductor.relaunch.runner")
    if runner is not None:
        runner.forget_all()
    split_off.forget()
    coverage.forget()


def note_outputs(original: Callable[..., None], compiled: Any, *args: Any, **kwargs: Any) -> None:
    """Seam of CompiledFxGraph.__init__: note which outputs of a graph the user sees, and what was split off. The FX
    graph is not available later, when the code is taken from the cache. Also note if the constructor disables CUDA
    graphs."""
    from torch_overlay._inductor.streams.alignment import left_to_runtime

    given = dict(zip(("current_callable", "graph", "gm", *[""] * 4, "cudagraphs"), args)) | kwargs
    wanted = given["cudagraphs"]
    before = bool(wanted)
    original(compiled, *args, **kwargs)
    if before and not wanted:
        wanted.overlay_wanted = True
    (output,) = given["gm"].graph.find_nodes(op="output")
    compiled._overlay_visible_outputs = tuple(output.meta.get("user_visible_output_idxs", ()))
    notes = partitions.of_graph(given["graph"])
    compiled._overlay_partitions = notes.plain()
    compiled._overlay_rewrites = rewrites.current().plain()
    compiled._overlay_owners = owners_of(given["graph"])
    compiled._overlay_numbers = free_numbers(given["gm"], notes)
    compiled.inputs_to_check = left_to_runtime(given["graph"], compiled.inputs_to_check)


def free_numbers(gm: Any, notes: Partitions) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the inputs that are integers on which no tensor's size or stride depends: those of the
    graph, then those of each partition, which count from the end. Offsets don't matter here: where generated code makes
    a view, its offset is computed from the number in sight, and an input's is in its address."""
    from torch import SymInt, Tensor
    from torch.fx.experimental.symbolic_shapes import free_symbols
    from torch.utils._pytree import tree_leaves

    in_shapes: set[str] = set()
    for module in gm.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
            for shape in [dims for tensor in tensors for dims in (tensor.size(), tensor.stride())]:
                in_shapes.update(map(str, free_symbols(shape)))
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    names = [str(v.node.expr) if isinstance(v, SymInt) and v.node.expr.is_Symbol else None for v in values]

    def free(symbols: Sequence[str | None]) -> Iterator[int]:
        return (k for k, symbol in enumerate(symbols) if symbol is not None and symbol not in in_shapes)

    partitions = [tuple(k - len(symbols) for k in free(symbols)) for _, _, symbols in notes.graphs]
    return tuple(free(names)), *partitions


def is_cudagraph_unsafe_fx_node(original: Callable[[Any], bool], node: Any) -> bool:
    """Seam: True for what we split off, too."""
    return original(node) or partitions.is_unsafe(node)


def get_cpp_wrapper_config(original: Callable[..., dict[str, Any]], log_cudagraph_skip: bool = True) -> dict[str, Any]:
    """Seam: report that code with a C++ wrapper gets no graph, since Inductor turns graphs off for it at this point."""
    import torch._inductor.config as inductor_config
    from torch._inductor.virtualized import V

    asked = inductor_config.triton.cudagraphs and log_cudagraph_skip and not V.aot_compilation
    changed = original(log_cudagraph_skip)
    if asked and not changed["triton.cudagraphs"] and config.cudagraphs == "relaunch":
        message = "torch._inductor.config.cpp_wrapper is on, and such code can't be cut into partitions; turn it off"
        refuse(Refused(Code(_compiled_frame(), device=0), "cpp-wrapper", message))
    return changed


def memory_plan_reuse(original: Callable[[Any], None], wrapper: Any) -> None:
    """Seam: give each buffer of an inference graph its own memory. If a kernel wrote a buffer that another kernel has
    read, the two couldn't run in parallel; and a capture packs the buffers itself, into as little memory."""
    import torch._inductor.config as inductor_config
    from torch._inductor.virtualized import V

    from torch_overlay._inductor.streams.codegen import has_streams

    asked = inductor_config.triton.cudagraphs and config.cudagraphs == "relaunch" and config.cudagraph_concurrency
    if asked and V.graph.is_inference and "cuda" in V.graph.device_types and not has_streams(wrapper):
        with inductor_config.patch(allow_buffer_reuse=False):
            return original(wrapper)
    return original(wrapper)


def cudagraphify(
    original: Callable[..., Any], model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **kwargs: Any
) -> Callable[..., Any]:
    mode = _compiling.mode or config.cudagraphs
    if mode == "trees":
        return make_tree(original, model, static_input_idxs, **kwargs)
    if mode == "off" or kwargs.get("kernel_free_cudagraph"):
        return model
    from torch_overlay._inductor.relaunch.runner import Runner

    number = _compiling.partition
    made = Runner(model, describe(static_input_idxs, **kwargs))
    if _compiling.record is not None:
        _compiling.record.add(made, number)
    return made


def make_tree(
    original: Callable[..., Any], model: Callable[..., Any], static_input_idxs: Sequence[int], **kwargs: Any
) -> Callable[..., Any]:
    return original(model, static_input_idxs, **kwargs)


def describe(
    static_input_idxs: Sequence[int],
    *,
    device_index: int,
    is_backward: bool,
    is_inference: bool,
    stack_traces: Sequence[str | None] = (),
    placeholders: Sequence[Any] = (),
    mutated_input_idxs: Sequence[int] = (),
    **_: Any,
) -> Code:
    kind, name = _named(is_backward, is_inference)
    graph, number = _compiling.graph, _compiling.partition
    _compiling.partition += 1
    maps = getattr(graph, "partition_maps", None) or ()
    partition = maps[number] if _is_partitioned(graph) and number < len(maps) else None
    if partition is not None and len(maps) > 1:
        name += f", partition {number}"
    return Code(
        name=name,
        device=index_now(written_index(device_index)),  # that of this rank, whichever compiled the code
        static_inputs=tuple(static_input_idxs),
        mutated_inputs=tuple(mutated_input_idxs),
        saved_outputs=_saved(graph, partition) if kind == "forward" else frozenset(),
        is_backward=is_backward,
        source=_partition_line(graph, number) or _first_line(placeholders, stack_traces),
        compile_id=_compile_id(),
        numbers=frozenset(_numbers(graph, partition, number)),
    )


def _numbers(graph: Any, partition: Any, number: int) -> tuple[int, ...]:
    whole, *partitions = getattr(graph, "_overlay_numbers", ((),))
    if partition is None:
        return whole
    return partitions[number] if number < len(partitions) else ()


def _partition_line(graph: Any, number: int) -> str:
    graphs = Partitions.read(getattr(graph, "_overlay_partitions", ())).graphs
    return graphs[number][1] if number < len(graphs) else ""


def describe_whole(compiled: Any) -> Code:
    """Describe code that Inductor makes no graph of, for a refusal."""
    settings, info = compiled.fx_kwargs, compiled.cudagraph_info
    is_backward = bool(settings.get("is_backward"))
    _, name = _named(is_backward, bool(settings.get("is_inference")))
    source = source_line((compiled.disabled_cudagraphs_reason or "").partition("Found from")[2])
    if not source and info is not None:
        source = _first_line(info.placeholders, info.stack_traces or ())
    device = index_now(written_index(next(iter(compiled.device_idxs), 0)))
    return Code(name, device, is_backward=is_backward, source=source, compile_id=_compile_id())


def _named(is_backward: bool, is_inference: bool) -> tuple[str, str]:
    kind = "backward" if is_backward else "inference" if is_inference else "forward"
    return kind, f"{kind} of {_compiled_frame()}"


def _compile_id() -> Any:
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def _compiled_frame() -> str:
    return f"compiled frame {_compile_id() or '?'}"


def _first_line(placeholders: Sequence[Any], stack_traces: Sequence[str | None]) -> str:
    traces = [t for p in placeholders for u in p.users if (t := u.stack_trace)] + [t for t in stack_traces if t]
    return source_line(traces[0]) if traces else ""


def _is_partitioned(graph: Any) -> bool:
    import torch._inductor.config as inductor_config

    return bool(inductor_config.graph_partition and inductor_config.cudagraph_policy is None)


def _saved(graph: Any, partition: Any) -> frozenset[int]:
    """Return the outputs of a forward that are saved for the backward: those after the outputs that the user sees. An
    output of a partition that only the next partition reads is not among them."""
    visible = getattr(graph, "_overlay_visible_outputs", ())
    if not visible:
        return frozenset()
    first = max(visible) + 1
    if partition is None:
        return frozenset(range(first, len(graph.cudagraph_info.stack_traces)))
    outputs = enumerate(partition.output_index_mapping)
    return frozenset(i for i, among in outputs if among and min(among) >= first)
