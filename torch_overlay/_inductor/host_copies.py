"""Copies between the device and host memory of the caller: asynchronous where eager's are, and only there.

`result.copy_(y, non_blocking=True)` into a pinned tensor of the caller is, after functionalization, a new host tensor
that is filled by a copy which blocks the host, and then a copy on the CPU into the caller's. Values are right, but
the side stream that was to carry the download is waited for in the middle of the graph. Here the pair becomes one
operation that copies into the caller's tensor on its stream, as eager does.

What the graph computes on the host and uploads with `non_blocking=True` Inductor makes in pinned memory, so that the
upload doesn't block. If the caller gets that memory, too, it may write there while the copy still reads: eager's memory
is pageable, and has been read when the call returns. Such an upload blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._library.custom_ops import custom_op

from torch_overlay._functorch.eager_memory import results_made
from torch_overlay._functorch.stream_placement import viewed
from torch_overlay._inductor.stream_passes import union_of_tokens


if TYPE_CHECKING:
    from torch.fx import Graph, Node


@custom_op("streams_memory::copy_to_host_", mutates_args=("destination",))
def copy_to_host_(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copies device memory into host memory without blocking the host, in the order of the current stream."""
    destination.copy_(source, non_blocking=True)


@copy_to_host_.register_fake
def _(destination: torch.Tensor, source: torch.Tensor) -> None:
    return None


COPY_TO_HOST = torch.ops.streams_memory.copy_to_host_.default


def _device_type(node: object) -> str:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.device.type if isinstance(value, torch.Tensor) else ""


def _downloads(write: Node) -> Node | None:
    """The device tensor that a write-back to an input copies from, if the user wrote a non-blocking copy."""
    destination, value = write.args[:2]
    if not isinstance(destination, torch.fx.Node) or not isinstance(value, torch.fx.Node):
        return None
    if destination.op != "placeholder" or _device_type(destination) != "cpu" or len(value.users) != 1:
        return None
    if value.target is not torch.ops.aten.copy.default or len(value.args) < 3 or value.args[2] is not True:
        return None
    source = value.args[1]
    same = isinstance(source, torch.fx.Node) and source.meta["val"].shape == destination.meta["val"].shape
    return source if same and _device_type(source) == "cuda" else None  # type: ignore[return-value]


def download_in_place(graph: Graph) -> None:
    """The copy is made where the user made it, for what it reads may be written later."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        source = _downloads(write)
        if source is None or write.users:
            continue
        destination, value = write.args[:2]
        if any(position.get(n, 0) > position[value] for n in destination.users if n not in (value, write)):
            continue  # what was in the tensor before is read later
        with graph.inserting_before(value):
            node = graph.call_function(COPY_TO_HOST, (destination, source))
        node.meta.update({key: item for key, item in value.meta.items() if key != "val"})
        customs = [n.meta.get("custom", {}) for n in (value, write)]
        if any(customs):
            node.meta["custom"] = {**customs[0], **customs[1], **union_of_tokens(customs)}
        node.meta["val"] = None
        graph.erase_node(write)
        graph.erase_node(value)


def upload_returned_memory_at_once(graph: Graph) -> None:
    """Uploads of host memory that leaves the graph block, unless eager's memory is pinned as well."""
    returned = results_made(graph.output_node())
    for target in (torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default):
        for node in graph.find_nodes(op="call_function", target=target):
            source = viewed(node.args[0])
            if source not in returned or source.op == "placeholder" or _is_pinned(source):
                continue
            if _device_type(source) == "cpu" and _device_type(node) == "cuda":
                if "non_blocking" in node.kwargs:
                    node.kwargs = {**node.kwargs, "non_blocking": False}
                node.args = (*node.args[:2], *(False for _ in node.args[2:]))


def _is_pinned(node: Node) -> bool:
    """Whether eager pins what the node makes: a download that doesn't block, or memory that was asked for as pinned."""
    if node.target is torch.ops.aten._pin_memory.default or node.kwargs.get("pin_memory"):
        return True
    is_copy = node.target is torch.ops.aten._to_copy.default and _device_type(node.args[0]) == "cuda"
    return is_copy and bool(node.kwargs.get("non_blocking"))
