"""Streams on an accelerator that isn't there: Dynamo traces code that uses them, and its graphs run without them.

    with accelerator(lambda device=None: stream(7)):
        torch.compile(function, backend=backend)(x, stream(8))

where `backend` calls `take_operations(gm)`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.guards
import torch._dynamo.utils

from torch_overlay._dynamo import objects


def stream(stream_id: int, device: int = 0) -> torch.Stream:
    return torch.Stream(stream_id=stream_id, device_index=device, device_type=1)


@contextlib.contextmanager
def accelerator(
    current: Callable[..., torch.Stream],
    device: Callable[[], int] = lambda: 0,
    set_stream: Callable[[torch.Stream], None] | None = None,
) -> Iterator[None]:
    """Answer as CUDA would. `current(device)`: the current stream of a device or, without one, of the current device,
    which is `device()`. `set_stream(stream)` is called where code makes a stream current."""
    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda")),
            (torch._C, "_accelerator_getDeviceIndex", device),
            (torch._C, "_accelerator_getStream", current),
            (torch._C, "_accelerator_setStream", set_stream),
            (torch._dynamo.utils, "get_current_stream", current),
            (torch._dynamo.guards, "get_current_stream", current),
            (objects, "callers_stream", current),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def take_operations(gm: torch.fx.GraphModule, with_tensors: bool = False) -> list[tuple[Any, ...]]:
    """Take the operations on streams out of a graph, but for those whose results are used. Return (name, *args) of each
    operation on streams and, `with_tensors`, (name, stream) of each other function that returns a tensor."""
    found: list[tuple[Any, ...]] = []
    for node in list(gm.graph.nodes):
        target = str(node.target).split(".")
        if target[0] == "streams":
            found.append((target[1], *node.args))
            if not node.users:
                gm.graph.erase_node(node)
        elif with_tensors and node.op == "call_function" and isinstance(node.meta.get("example_value"), torch.Tensor):
            found.append((node.name, node.meta.get("custom", {}).get("stream")))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return found
