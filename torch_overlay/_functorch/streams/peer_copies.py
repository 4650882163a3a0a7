"""Find the copies between two GPUs, which eager orders with two streams though nobody wrote a wait.

PyTorch runs a copy between GPUs on the stream that is current on the source's device. That stream first waits for the
one that is current on the destination's device, which waits for it afterwards. So a copy is two waits of the user's
stream program, and code after the call may rely on them. Which stream is current on a device follows from where the
node was placed: on a stream of that device, or else the device's current stream is the one of the frame's caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import callers_stream_index


if TYPE_CHECKING:
    from torch.fx import Node

_COPIES = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.prims.device_put.default,
)


def _device(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.device.index if isinstance(value, torch.Tensor) and value.device.type == "cuda" else None


class PeerCopies:
    """Finder of a graph's copies between two GPUs, with their streams, as indices of the registry."""

    def __init__(self) -> None:
        from torch_overlay._dynamo import registry

        streams = [i for i in registry.describe() if i.kind == "stream" and i.device is not None]
        self.devices = {i.index: i.device.index for i in streams if i.device is not None}
        self.callers_stream = {
            i.device.index: i.index for i in streams if i.origin == "current" and i.device is not None
        }

    def current(self, device: int, node: Node) -> int:
        stream = node_stream(node)
        if stream and self.devices.get(stream) == device:
            return stream
        if device not in self.callers_stream:  # no operation of the user's names the stream
            self.callers_stream[device] = callers_stream_index(device)
        return self.callers_stream[device]

    def ends(self, node: Node) -> tuple[int, int] | None:
        """Return the streams that are current on the devices of the source and of the result; None for a node that is
        no copy between GPUs.
        """
        if node.target not in _COPIES or (target := _device(node)) is None:
            return None
        for source in node.all_input_nodes:
            if (device := _device(source)) is not None and device != target:
                return self.current(device, node), self.current(target, node)
        return None


__all__ = ["PeerCopies"]
