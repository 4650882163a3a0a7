"""Replace functions of Inductor's scheduler and wrapper, for regions with a plan (seams).

`planned_region` plans them and orders streams around several, `emitter` writes a plan into the wrapper's lines, which
`switching` defines; it inserts the switches of the current stream.
"""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

from torch._inductor.virtualized import V

from torch_overlay import config
from torch_overlay._dynamo.ops import NVTX, range_mark, range_push, RANGES
from torch_overlay._inductor import kernel_places
from torch_overlay._inductor.notes import active_region, WrapperNotes
from torch_overlay._inductor.offload.codegen import is_copy
from torch_overlay._inductor.scheduler_nodes import makes_lazy_zeros, stream_operation
from torch_overlay._inductor.streams.planned_region import (
    needs_plan,
    ordered_around,
    place_workspaces,
    planned,
    reason_to_cut,
    stream_of_memory,
)
from torch_overlay._inductor.streams.region_names import root_of
from torch_overlay._inductor.streams.switching import has_streams, share_memory, switch_streams
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode


CROSS_DEVICE = "cross-device ops"  # upstream's reason
_RUNTIME_OF_RANGES = "from torch_overlay._dynamo.ops import pop_range, push_range"


def codegen(original: Callable[..., None], scheduler: Any, nodes: Sequence[BaseSchedulerNode]) -> None:
    if not handles_streams() or not needs_plan(scheduler):
        return original(scheduler, nodes)
    with planned(scheduler, nodes):
        return original(scheduler, nodes)


def codegen_partitions(original: Callable[..., None], scheduler: Any) -> None:
    if not handles_streams():
        return original(scheduler)
    with ordered_around(scheduler):
        return original(scheduler)


def should_partition(original: Callable[..., str | None], scheduler: Any, node: BaseSchedulerNode) -> str | None:
    """Return why the graph is partitioned at a node, or None."""
    reason = original(scheduler, node)
    if reason == CROSS_DEVICE and is_copy(node) and config.cudagraphs == "relaunch":
        return None  # the host's side is a slab, whose address doesn't change
    if reason is None and config.cudagraphs == "relaunch" and makes_lazy_zeros(node):
        return "zeros without memory"  # there is no address that a graph could return
    if reason is None and handles_streams():
        return reason_to_cut(scheduler, node)
    return reason


def enter_context(original: Callable[..., None], scheduler: Any, node: BaseSchedulerNode) -> None:
    emitter = active_region(scheduler)
    if stream_operation(node) is not None:  # it has no device, whose change would have written the host's kernels out
        scheduler.flush()
    if emitter is not None:
        emitter.before(node)
    original(scheduler, node)


def codegen_device_guard_enter(
    original: Callable[..., None], wrapper: Any, device_idx: int, *args: Any, **kwargs: Any
) -> None:
    """A planned region looks its streams up at its entry; the guard only sets the device."""
    if active_region(V.graph.scheduler) is None:
        original(wrapper, device_idx, *args, **kwargs)
    else:
        original(wrapper, device_idx)


def codegen_free(original: Callable[..., None], wrapper: Any, buffer: Any) -> None:
    emitter = active_region(V.graph.scheduler)
    if emitter is None:
        original(wrapper, buffer)
    else:
        emitter.free(buffer, lambda: original(wrapper, buffer))


def write_range(wrapper: Any, node: Any) -> bool:
    """Write an operation of a profiler range as a direct call. False: the node is another operation."""
    overload = node.op_overload
    if overload not in RANGES:
        return False
    arguments, is_push = node.constant_args, overload is range_push
    if overload is range_mark:
        wrapper.writeline(f"torch.cuda.nvtx.mark({arguments[0]!r})")
    elif arguments[0] == NVTX:
        wrapper.writeline(f"torch.cuda.nvtx.range_push({arguments[1]!r})" if is_push else "torch.cuda.nvtx.range_pop()")
    else:
        imports = root_of(wrapper).imports
        if not imports.contains(_RUNTIME_OF_RANGES):
            imports.writeline(_RUNTIME_OF_RANGES)
        wrapper.writeline(f"{'push_range' if is_push else 'pop_range'}({', '.join(map(repr, arguments))})")
    return True


def generate_fallback_kernel(original: Callable[..., None], wrapper: Any, node: Any) -> None:
    emitter = active_region(V.graph.scheduler)
    if write_range(wrapper, node):
        return
    elif emitter is None or not emitter.write_stream_operation(node):
        original(wrapper, node)


def generate_fallback_kernel_with_runtime_lookup(
    original: Callable[..., None], wrapper: Any, name: str, *args: Any, **kwargs: Any
) -> None:
    """Write a stream operation in C++, where upstream takes it for an operator without a function in C."""
    emitter = active_region(V.graph.scheduler)
    node: Any = V.graph.try_get_buffer(name)
    if emitter is None or not emitter.write_stream_operation(node):
        original(wrapper, name, *args, **kwargs)
    elif V.extern_kernel_nodes:
        V.extern_kernel_nodes.pop()  # as upstream does for those that it writes itself


def codegen_deferred_alignment_copies(
    original: Callable[..., None], wrapper: Any, input_names: Iterable[str], stream: int = 0
) -> None:
    """Write a planned region's aligned copies: Note [Aligned copies and the caller's memory] of `streams.alignment`."""
    emitter = active_region(V.graph.scheduler)
    if emitter is None or emitter.node is None:
        original(wrapper, input_names, stream)
    else:
        emitter.aligned.copy(functools.partial(original, wrapper), emitter.node, stream)


def outside_of_regions(original: Callable[..., None], writer: Any, *args: Any) -> None:
    """Leave out in planned regions what upstream writes. They switch streams per line, not per node, and leave a copy
    to pinned memory asynchronous: the plan makes the host wait where the host reads it, only there.
    """
    if active_region(V.graph.scheduler) is None:
        original(writer, *args)


def write_get_raw_stream(original: Callable[..., str], wrapper: Any, device_idx: int, graph_name: str) -> str:
    raw = None if V.graph.cpp_wrapper else WrapperNotes.of(wrapper).raw_stream  # C++ asks here for benchmarks alone
    return original(wrapper, device_idx, graph_name) if raw is None else raw


def raw_stream_of_cpp(original: Callable[..., str], wrapper: Any, device_idx: int, graph_name: str) -> str:
    return WrapperNotes.of(wrapper).raw_stream or original(device_idx, graph_name)


def get_buf_stream(original: Callable[..., int], scheduler: Any, name: str) -> int:
    """Return the stream whose memory a buffer lives in. Upstream follows mutation renames and loses it."""
    stream = stream_of_memory(scheduler, name)
    return original(scheduler, name) if stream is None else stream


def has_cross_stream_hazard(original: Callable[..., bool], scheduler: Any, name: str, node: BaseSchedulerNode) -> bool:
    """True if `node` must not write in place over a buffer: the buffer isn't its stream's, or another stream may still
    use it.
    """
    emitter = active_region(scheduler)
    if emitter is None:
        return original(scheduler, name, node)
    return not emitter.may_write_in_place(scheduler.mutation_real_name.get(name, name), node)


def run_wrapper_ir_passes(original: Callable[..., None], wrapper: Any, is_inference: bool) -> None:
    if not has_streams(wrapper):
        original(wrapper, is_inference)
    else:
        wrapper.lines = place_workspaces(V.graph.scheduler, wrapper.lines)
        original(wrapper, False)  # pooling memory planning shares blocks between streams
        wrapper.lines = switch_streams(share_memory(wrapper.lines))
    if config.nvtx is True and not (V.graph.cpp_wrapper or V.graph.fx_wrapper):
        wrapper.lines = kernel_places.mark(wrapper.lines)
