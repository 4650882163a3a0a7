"""Assign streams to kernels that the scheduler has grouped before it asks which stream they belong to.

The kernels of a `torch._foreach` operator, and the copies of inputs into a concatenation, become one node of the
scheduler. That node has no IR node of its own, by which upstream looks up a stream, so it would run on the current
stream. Here it gets the stream of its parts, which come from one operation.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable


def populate_stream_assignments(original: Callable[..., None], scheduler: Any) -> None:
    original(scheduler)
    if not handles_streams():
        return
    for node in scheduler.nodes:
        if node.node is not None:
            continue
        streams = {part.node.get_stream_idx() for part in node.get_nodes() if part.node is not None}
        if len(streams) != 1 or (user := streams.pop()) is None:
            continue
        stream = scheduler.node_to_stream[node] = scheduler._get_or_create_stream_idx_for_user_obj(user)
        scheduler.buff_to_stream.update(dict.fromkeys(node.get_buffer_names(), stream))
        scheduler._multi_stream_nodes = True
