"""What the overlay adds to the keys of the FX graph cache and of the AOTAutograd cache.

Upstream's keys are computed from the text of the graph, the metadata of its inputs and the configuration. They don't
see node metadata, and therefore not the stream that a node was placed on: `x * 2` inside and outside of
`with torch.cuda.stream(s)` have the same key, and whichever is compiled first is served for both. They don't see us
either: code compiled with the overlay could be served to a process without it, and the other way round.

Both keys are hashes over the attributes of a details object whose class for AOTAutograd derives from the one for
Inductor, so one more attribute, set by that one constructor, enters both.
"""

from __future__ import annotations

import hashlib
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# (name of the graph module, position of the node, stream index) of every node that is not on the ambient stream
Placement = tuple[tuple[str, int, int], ...]

# GraphModule.meta[GRAPH_META] may hold what else about a graph changes its code; its repr enters the key.
GRAPH_META = "torch_overlay"


def placement(gm: torch.fx.GraphModule) -> Placement:
    """Where the nodes of a graph, and of the graphs nested in it, are placed."""
    from torch.fx import GraphModule

    found = []
    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            for position, node in enumerate(module.graph.nodes):
                stream = (node.meta.get("custom") or {}).get("stream")
                if stream:
                    found.append((name, position, stream))
    return tuple(found)


def graph_notes(gm: torch.fx.GraphModule) -> tuple[tuple[str, str], ...]:
    """The notes that our passes left on a graph and on the graphs nested in it."""
    from torch.fx import GraphModule

    return tuple(
        (name, repr(module.meta[GRAPH_META]))
        for name, module in gm.named_modules()
        if isinstance(module, GraphModule) and GRAPH_META in module.meta
    )


def config_digest() -> str:
    """Digest of the options, the same in every process that has the same options."""
    from torch_overlay import config

    return hashlib.sha256(repr(sorted(config.save_config_portable().items())).encode()).hexdigest()[:16]


def overlay_key(gm: torch.fx.GraphModule | None) -> tuple[Any, ...]:
    """Everything of ours that the code compiled for a graph depends on. Upstream adds the version of torch."""
    from torch_overlay.version import __version__, source_digest

    own = (__version__, source_digest(), config_digest())
    return own if gm is None else (*own, placement(gm), graph_notes(gm))


def hash_details_init(original: Callable[..., None], self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
    """Seam of FxGraphHashDetails.__init__."""
    original(self, gm, *args, **kwargs)
    self.torch_overlay = overlay_key(gm)
