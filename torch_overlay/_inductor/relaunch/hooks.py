"""Takes Inductor's request for CUDA graphs to our policy, for users who set none, and gives the policy what only a hook
sees: Note [What a policy can't do] of `policy`.

`config.cudagraphs` chooses between our graphs, upstream's trees, and none. The choice is made when a forward is
compiled, and its backward uses the same one: autograd may compile the backward much later, in another thread, where the
option has another value.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch._inductor.config as inductor_config

from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch import notes
from torch_overlay._inductor.relaunch.capture.device import prepare_early
from torch_overlay._inductor.relaunch.policy import (
    is_asked,
    is_set,
    own_buffers,
    refuse_cpp_wrapper,
    RelaunchPolicy,
    wrapping,
)
from torch_overlay._inductor.relaunch.rewrites.graph import move_numbers
from torch_overlay._inductor.relaunch.rewrites.resident import is_wanted, residing, rewritten
from torch_overlay._inductor.streams.graph_facts import settle_owners


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import GraphModule


RELAUNCH = RelaunchPolicy()


def is_of_others() -> bool:
    """True if the user has set a policy that isn't ours."""
    return inductor_config.cudagraph_policy is not None and not is_set()


def are_ours() -> bool:
    """True if code that is compiled now gets our graphs where it asks for graphs."""
    return config.cudagraphs == "relaunch" and not is_of_others()


def chosen_mode(device_box: Any) -> str:
    """Return the value of `config.cudagraphs` at the forward's compilation. It is kept on the device box, which a
    forward and its backward share."""
    mode = getattr(device_box, "overlay_cudagraphs", None) or config.cudagraphs
    if device_box is not None:
        device_box.overlay_cudagraphs = mode
    return mode


def _compile_fx_inner(
    original: Callable[..., Any], gm: GraphModule, example_inputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Rewrite the graph, if it is to have CUDA graphs."""
    if not (are_ours() and is_wanted(kwargs.get("cudagraphs"))):
        return original(gm, example_inputs, *args, **kwargs)
    with rewritten(gm, example_inputs, kwargs.get("is_backward", False)) as inputs:
        return original(gm, inputs, *args, **kwargs)


def _recursive_joint_graph_passes(
    original: Callable[..., GraphModule], gm: GraphModule, *args: Any, **kwargs: Any
) -> GraphModule:
    """Before a graph is partitioned, compute on the device what it reads of numbers in host memory."""
    changed = original(gm, *args, **kwargs)
    if are_ours() and is_wanted(None):
        move_numbers(changed)
    return changed


def post_compile(
    original: Callable[..., None],
    compiled: Any,
    example_inputs: Sequence[Any],
    constants: Any,
    graph_kwargs: dict[str, Any],
) -> None:
    """Seam of CompiledFxGraph.post_compile: wrap code that was just compiled, or comes from a cache, in graphs, and in
    what copies to the device the inputs that it was rewritten to take there. Note for its backward whose memory it
    saves. If the option asks for it, name its calls in profiles."""
    switch = graph_kwargs.get("cudagraphs")
    with (
        residing(compiled) as residents,
        _choosing(compiled, switch, graph_kwargs.get("boxed_forward_device_index")),
        wrapping(compiled, switch, residents),
    ):
        original(compiled, example_inputs, constants, graph_kwargs)
        if inductor_config.cudagraph_policy is RELAUNCH:
            RELAUNCH.wrap_output(compiled)  # a policy of the user's is asked by Inductor
    settle_owners(notes.CompiledNotes.of(compiled).owners)
    if config.nvtx is True:
        compiled.current_callable = profiler_ranges.within(
            notes.describe_whole(compiled).name, compiled.current_callable
        )


@contextlib.contextmanager
def _choosing(compiled: Any, switch: Any, device_box: Any) -> Iterator[None]:
    """Have Inductor ask our policy inside, or one of the user's, or none."""
    if is_of_others() or not (switch or is_asked(compiled)):
        yield
        return
    users = inductor_config.cudagraph_policy
    mode = "relaunch" if users is not None else chosen_mode(device_box)
    if mode != "relaunch":
        if mode == "off":
            type(switch).disable(switch)
        yield
        return
    with inductor_config.patch(cudagraph_policy=users or RELAUNCH):
        yield


def maybe_handle_backward_generation(original: Callable[..., None], compiled_graph: Any, device_box: Any) -> None:
    """Seam: call the original for trees alone, since only trees have generations."""
    if not is_set():
        original(compiled_graph, device_box)


def note_outputs(original: Callable[..., None], compiled: Any, *args: Any, **kwargs: Any) -> None:
    """Seam of CompiledFxGraph.__init__: note what only the FX graph says."""
    from torch_overlay._inductor.streams.alignment import left_to_runtime

    given = dict(zip(("current_callable", "graph", "gm"), args)) | kwargs
    original(compiled, *args, **kwargs)
    notes.note(compiled, given["graph"], given["gm"])
    compiled.inputs_to_check = left_to_runtime(given["graph"], compiled.inputs_to_check)


def is_cudagraph_unsafe_fx_node(original: Callable[[Any], bool], node: Any) -> bool:
    """Seam: True for what we split off, too."""
    return original(node) or (are_ours() and notes.is_unsafe(node))


def log_graph_partitions(
    original: Callable[..., None], scheduler: Any, parts: Sequence[Any], signatures: Sequence[Any]
) -> None:
    """Override Scheduler._log_graph_partitions: note each partition."""
    from torch._inductor.virtualized import V

    notes.note_partitions(V.graph, scheduler, parts, signatures)
    original(scheduler, parts, signatures)


def get_cpp_wrapper_config(original: Callable[..., dict[str, Any]], log_cudagraph_skip: bool = True) -> dict[str, Any]:
    """Seam: report that code with a C++ wrapper gets no graph, since Inductor turns graphs off for it at this point."""
    from torch._inductor.virtualized import V

    asked = inductor_config.triton.cudagraphs and log_cudagraph_skip and not V.aot_compilation
    changed = original(log_cudagraph_skip)
    if asked and not changed["triton.cudagraphs"] and config.cudagraphs == "relaunch":
        refuse_cpp_wrapper()
    return changed


def memory_plan_reuse(original: Callable[[Any], None], wrapper: Any) -> None:
    """Override: give each buffer its own memory, if kernels may run side by side."""
    from torch._inductor.virtualized import V

    from torch_overlay._inductor.streams.codegen import has_streams

    if are_ours() and own_buffers(V.graph) and not has_streams(wrapper):
        with inductor_config.patch(allow_buffer_reuse=False):
            return original(wrapper)
    return original(wrapper)


def memory_stats(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Seam of torch.cuda.memory.memory_stats_as_nested_dict."""
    from torch_overlay._inductor.relaunch.capture.recording import drop_empty_pools

    stats = original(*args, **kwargs)
    drop_empty_pools(stats)
    return stats


def wait_for_kernels(original: Callable[[Any, dict[str, Any]], None], compiler: Any, scope: dict[str, Any]) -> None:
    """Seam of AsyncCompile.wait: prepare for captures while the workers compile."""
    if inductor_config.triton.cudagraphs and config.cudagraphs == "relaunch":
        prepare_early()
    original(compiler, scope)
