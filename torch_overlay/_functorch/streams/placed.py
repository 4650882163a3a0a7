"""Describes for keys of caches where the nodes of FX graphs are placed, and what numbers of streams stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch

    from torch_overlay.frame_facts import FrameFacts

# (name of the graph module, position of the node, what its metadata says of streams), for each node with such metadata
Placement = tuple[tuple[str, int, str], ...]


def stream_notes(node: torch.fx.Node) -> str:
    """Return the node's stream and the tokens of its boundary effects; empty if the program has no streams."""
    custom = node.meta.get("custom") or {}
    notes = {key: value for key, value in custom.items() if key.startswith("stream_")}
    if custom.get("stream"):  # index 0 is the caller's stream, as is no index
        notes["stream"] = custom["stream"]
    return repr(sorted(notes.items())) if notes else ""


def placement(gm: torch.fx.GraphModule) -> Placement:
    """Return where the nodes of a graph, and of the graphs nested in it, are placed."""
    from torch.fx import GraphModule

    found = []
    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            for position, node in enumerate(module.graph.nodes):
                if notes := stream_notes(node):
                    found.append((name, position, notes))
    return tuple(found)


def stream_objects(frame: FrameFacts) -> tuple[object, ...]:
    """Return what Dynamo knows of the streams and events of the frame, and of the streams that first read its inputs.
    If the frame uses the caller's stream alone, return whether the program has other streams: that matters to a copy
    that blocks the host.
    """
    objects = tuple(map(repr, frame.objects))
    if len(objects) <= 1:
        objects = ("streams",) * frame.program_has_streams
    if not objects:
        return ()
    readers = sorted(frame.first_readers.items())
    return (*objects, *readers, *("goes on",) * frame.goes_on, *("resumed",) * frame.is_resumed)
