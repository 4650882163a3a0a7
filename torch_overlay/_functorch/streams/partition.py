"""Prepares a joint graph with streams for the partitioner, and places the two graphs that it is parted into."""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.streams.backward import place_parts
from torch_overlay._functorch.streams.eager_memory import saved_in_eager
from torch_overlay._functorch.streams.engine_order import engine_streams, order_after_gradients
from torch_overlay._functorch.streams.ids import CALLERS_STREAM


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.fx import Graph, GraphModule, Node


def prepare_parts(joint: Graph, inputs: Mapping[Node, Any]) -> Callable[[GraphModule, GraphModule], None]:
    """Order the backward's kernels as autograd's engine does, while the whole graph is there to see. Return what places
    the forward and the backward that the partitioner makes of it.

    `inputs` maps the forward's inputs to what AOTAutograd knows of them (`InputAliasInfo`).
    """
    streams = engine_streams(joint, [node for node, info in inputs.items() if info.is_leaf])
    order_after_gradients(joint, streams)
    saved = saved_in_eager(joint)
    unread = {node.name: info.is_leaf and info.requires_grad for node, info in inputs.items() if node not in saved}
    return functools.partial(place_parts, engine={*streams.values()} - {CALLERS_STREAM}, unread=unread)
