"""Has Inductor's schedulers and wrappers be of subclasses that override methods (seams of their constructors)."""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu

from torch_overlay._inductor.offload.hooks import compute_last_usage
from torch_overlay._inductor.relaunch import conditions, hooks as relaunch
from torch_overlay._inductor.streams import codegen, lowering
from torch_overlay.hooks import override
from torch_overlay.upstream_fixes import mutation_order, partition_concat


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def scheduler_init(original: Callable[..., None], scheduler: Any, nodes: Sequence[Any]) -> None:
    override(
        scheduler,
        compute_dependencies=lowering.compute_dependencies,
        dead_node_elimination=mutation_order.dead_node_elimination,
        _populate_stream_assignments=lowering.populate_stream_assignments,
        compute_last_usage=compute_last_usage,
        should_partition=should_partition,
        _log_graph_partitions=relaunch.log_graph_partitions,
        get_graph_partition_signature=partition_concat.get_graph_partition_signature,
        _codegen=codegen.codegen,
        _codegen_partitions=codegen.codegen_partitions,
        enter_context=codegen.enter_context,
        generate_stream_ctx_switching=codegen.outside_of_regions,
        get_buf_stream=codegen.get_buf_stream,
        has_cross_stream_hazard=codegen.has_cross_stream_hazard,
    )
    original(scheduler, nodes)


def should_partition(original: Callable[..., str | None], scheduler: Any, node: Any) -> str | None:
    """Return why the graph is partitioned at a node, or None."""
    return conditions.reason_to_cut(scheduler, node, codegen.should_partition(original, scheduler, node))


def wrapper_init(original: Callable[..., None], wrapper: Any) -> None:
    override(
        wrapper,
        codegen_device_guard_enter=codegen.codegen_device_guard_enter,
        codegen_free=codegen.codegen_free,
        generate_fallback_kernel=codegen.generate_fallback_kernel,
        codegen_deferred_alignment_copies=codegen.codegen_deferred_alignment_copies,
        sync_d2h_copy=codegen.outside_of_regions,
        run_wrapper_ir_passes=codegen.run_wrapper_ir_passes,
        memory_plan_reuse=relaunch.memory_plan_reuse,
        codegen_switch=conditions.codegen_switch,
    )
    if isinstance(wrapper, CppWrapperGpu):
        fallback = codegen.generate_fallback_kernel_with_runtime_lookup
        override(wrapper, generate_fallback_kernel_with_runtime_lookup=fallback)
    original(wrapper)
    if isinstance(wrapper, CppWrapperGpu):  # whose own method the constructor has put into a cache
        raw_stream = functools.partial(codegen.raw_stream_of_cpp, wrapper.write_get_raw_stream, wrapper)
        wrapper.write_get_raw_stream = raw_stream
