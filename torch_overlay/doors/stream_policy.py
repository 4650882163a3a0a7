"""A policy for the streams in AOTAutograd's graphs, in place of upstream's passes.

AOTAutograd captures a graph with the user's streams on its nodes, and the user's synchronisation as operations. Then it
runs the passes of `torch._functorch._aot_autograd.streams`: for a joint graph they give streams to gradients, insert
synchronisation and keep tensors alive; for every graph they wrap what synchronises. A policy that handles the graph's
streams is called instead of all of them, and keeps what it has to know at run time in the graph's metadata.

When a graph's code has returned, the epilogue writes back the inputs that the graph updates, and makes views anew that
are results. The policy says which calls follow the former, and makes the latter, so that it may choose their streams.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, Protocol, TYPE_CHECKING

from torch_overlay.doors import registered


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch.fx import GraphModule

    # Called with a base and the function that makes a view of it, which returns the view.
    ViewMaker = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


class StreamPolicy(Protocol):
    def handles_streams(self) -> bool:
        """Return whether the policy handles the streams of the graph that is being compiled."""

    def place(self, gm: GraphModule, metadata: ViewAndMutationMeta, is_joint: bool) -> None:
        """Choose the streams of a graph's nodes, and its synchronisation."""

    def after_epilogue(self, metadata: ViewAndMutationMeta) -> Callable[[], None] | None:
        """Return a function to be called after each epilogue, if there is something to do."""

    def view_makers(self, metadata: ViewAndMutationMeta) -> Sequence[ViewMaker | None]:
        """Return, for the results of a graph, functions that make those which are views; none at all is enough."""


_IS_JOINT = "stream_policy_is_joint"  # in `meta` of a graph, from the first of upstream's passes to the last


def policy() -> StreamPolicy:
    return registered("stream_policy")


def leave_out(original: Callable[[GraphModule], None], gm: GraphModule) -> None:
    """Leave a pass of upstream's out if the policy handles the streams."""
    if not policy().handles_streams():
        original(gm)


assign_epilogue_copy_streams = insert_backward_syncs = sync_deallocations = leave_out
wrap_all_sync_nodes_with_control_deps = leave_out


def assign_backward_streams(original: Callable[[GraphModule], None], gm: GraphModule) -> None:
    """Leave upstream's first pass out, which only joint graphs have."""
    gm.meta[_IS_JOINT] = True
    leave_out(original, gm)


def populate_fw_metadata_with_stream_indices(
    original: Callable[[GraphModule, ViewAndMutationMeta], None], gm: GraphModule, metadata: ViewAndMutationMeta
) -> None:
    """Have the policy place the streams: this is the last of upstream's passes."""
    is_joint = gm.meta.pop(_IS_JOINT, False)
    if not policy().handles_streams():
        return original(gm, metadata)
    return policy().place(gm, metadata, is_joint)


@dataclasses.dataclass(frozen=True)
class _MadeBy:
    """A result's recorded views and the policy's function that makes them, from the metadata to `make_view`."""

    maker: ViewMaker
    recorded: Any


def create_runtime_wrapper(
    original: Callable[..., Callable[..., Any]], compiled: Any, *, runtime_metadata: ViewAndMutationMeta, **kwargs: Any
) -> Callable[..., Any]:
    """Make what runs a graph's code and the epilogue."""
    after = policy().after_epilogue(runtime_metadata)
    if any(makers := policy().view_makers(runtime_metadata)):
        infos: Sequence[Any] = runtime_metadata.output_info
        runtime_metadata = copy.copy(runtime_metadata)
        runtime_metadata.output_info = [
            dataclasses.replace(info, view_meta_sequence=_MadeBy(maker, info.view_meta_sequence)) if maker else info
            for info, maker in zip(infos, makers)
        ]
    wrapper = original(compiled, runtime_metadata=runtime_metadata, **kwargs)
    if after is None:
        return wrapper

    @functools.wraps(wrapper)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = wrapper(*args, **kwargs)
        after()
        return result

    return run


def gen_alias_from_base(
    original: Callable[..., torch.Tensor],
    base: torch.Tensor,
    target: torch.Tensor,
    requires_grad: bool,
    views: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    if type(views) is not _MadeBy:
        return original(base, target, requires_grad, views, **kwargs)
    return views.maker(base, lambda of: original(of, target, requires_grad, views.recorded, **kwargs))
