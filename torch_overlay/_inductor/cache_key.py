"""Add what the overlay's code depends on to the keys of the FX graph cache and of the AOTAutograd cache.

Upstream's keys are computed from the text of the graph, the metadata of its inputs and the configuration. They don't
see node metadata, and therefore not the stream that a node was placed on: `x * 2` inside and outside of `with
torch.cuda.stream(s)` have the same key, and whichever is compiled first is served for both. They don't see the overlay
either: code compiled with the overlay could be served to a process without it, and the other way round.

Both keys are hashes over the attributes of a details object whose class for AOTAutograd derives from the one for
Inductor, so one more attribute, set by that one constructor, enters both. AOTAutograd's key is that of Dynamo's graph,
before our passes: there the key also depends on what Dynamo knows of the streams and events that the graph's indices
stand for. Inductor's key sees what the passes noted of that on the nodes.
"""

from __future__ import annotations

import hashlib
from typing import Any, TYPE_CHECKING

from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import placement, stream_objects


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def config_digest() -> str:
    """Return a digest of the options, the same in every process that has the same options."""
    from torch_overlay import config

    return hashlib.sha256(repr(sorted(config.save_config_portable().items())).encode()).hexdigest()[:16]


def graphs() -> tuple[object, ...]:
    """Return the options of CUDA graphs, if the code asks for them, whether conditions are inside, the operators that
    are split off, and whether the frame reads the handle of a stream: they decide how code is partitioned, how it
    allocates and frees memory, and whether it gets graphs at all.
    """
    import torch._inductor.config as inductor_config

    from torch_overlay import config

    if not inductor_config.triton.cudagraphs:
        return ()
    from torch_overlay._inductor.relaunch import conditions, split_off

    options = config.cudagraphs, config.cudagraph_concurrency, config.cudagraph_rewrites
    if not conditions.ARE_INSIDE:
        options = *options, "conditions are split off"
    return *options, frame_facts.current().handle_is_read, *sorted(split_off.failed())


def offload_room() -> tuple[int, ...]:
    """Return the device's free memory in GiB, by which `activation_offload = "auto"` plans."""
    import torch

    from torch_overlay import config

    if config.activation_offload != "auto" or not torch.cuda.is_initialized():
        return ()
    return (torch.cuda.mem_get_info()[0] >> 30,)


def overlay_key(gm: torch.fx.GraphModule | None, is_dynamo_graph: bool) -> tuple[Any, ...]:
    """Return everything of the overlay's that the code compiled for a graph depends on. Upstream adds the version of
    torch.
    """
    from torch_overlay._inductor.relaunch.rewrites.graph import current
    from torch_overlay.version import __version__, source_digest

    own = (__version__, source_digest(), config_digest(), *graphs(), *offload_room(), *current.value.key())
    if gm is None:
        return own
    return (*own, placement(gm), stream_objects(frame_facts.current()) if is_dynamo_graph else ())


def hash_details_init(original: Callable[..., None], self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
    """Seam of FxGraphHashDetails.__init__."""
    original(self, gm, *args, **kwargs)
    # AOTAutograd's class sets this attribute before it calls the constructor of its base.
    self.torch_overlay = overlay_key(gm, is_dynamo_graph=hasattr(self, "aot_config"))


def check_node_safe(original: Callable[..., None], node: torch.fx.Node) -> None:
    """Seam: the AOTAutograd cache may hold graphs that look streams and events up by their numbers. Where code is
    compiled on one rank for all, upstream's Dynamo traces them."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index
    from torch.fx.experimental.proxy_tensor import _coor_enabled

    from torch_overlay._stream_handling import handles_streams

    if node.target is not get_external_object_by_index or not handles_streams() or _coor_enabled():
        original(node)
