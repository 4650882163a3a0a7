"""Streams of a capture, and the code that can't be captured.

Note [Streams of a capture]
A region and its side streams are captured on streams that only captures use: if other code could use a stream in the
meantime, its launches would be captured into the graph. For the time of the capture, the stream objects of the running
frame are replaced by these streams, and so are the copy streams of saved activations.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.offload import runtime
from torch_overlay._inductor.relaunch.capture.allocations import names_in, namespace_of
from torch_overlay._inductor.relaunch.causes import COMMUNICATION
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay._inductor.streams.region_spec import OperationKind, RegionSpec


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    Instead: TypeAlias = "Callable[[Hashable], torch.cuda.Stream]"  # the same stream for the same key


CALLERS = "the caller's"  # the key of the stream that the region is launched on


@functools.cache
def capture_stream(index: int, number: int = 0) -> torch.cuda.Stream:
    """Return one of the streams of a device that only captures use. They are made when they are first needed, and
    kept."""
    driver = Driver()
    with torch.cuda.device(index):
        handle = driver.call("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    return torch.cuda.ExternalStream(int(handle), device=index)


@contextlib.contextmanager
def exchanged_streams(stream_of: Callable[[int], torch.cuda.Stream]) -> Iterator[None]:
    """Replace the streams that compiled code uses by numbered ones. Note [Streams of a capture]."""
    names: dict[Hashable, int] = {CALLERS: 0}

    def instead(key: Hashable) -> torch.cuda.Stream:
        return stream_of(names.setdefault(key, len(names)))

    with runtime.exchanged(lambda number: instead(("copies", number))), _exchanged_objects(instead):
        yield


@contextlib.contextmanager
def _exchanged_objects(instead: Instead) -> Iterator[None]:
    """Replace the table of stream objects. An owned stream is made when it is first looked up; events stay."""
    table = objects.current()
    if table is None:
        yield
        return
    exchanged = []
    for index, found in enumerate(table):
        if type(found) is objects.Owned:
            found = found.resolve()
        if isinstance(found, torch.Stream):
            found = instead((found.device_index, found.stream_id) if index else CALLERS)
        exchanged.append(found)
    objects.install(exchanged)
    try:
        yield
    finally:
        objects.install(table)


def check(model: Any) -> None:
    """Raise `Unprovable` if this compiled code can't be captured.

    It may contain collectives, if it comes from a cache, compiled for other graphs than ours: Note [Collectives].

    It may have to order streams of the caller's: a partition orders its side streams against the caller's stream alone,
    and the code around the partition orders them against other streams. Code that is not partitioned does both itself.
    """
    names, namespace = names_in(model), namespace_of(model)
    if found := set(names).intersection(COMMUNICATION):
        message = f"it contains collectives ({', '.join(sorted(found))}), and was compiled to keep them inside"
        raise Unprovable("collective", f"{message}; torch._inductor.config.force_disable_caches compiles it anew")
    for spec in (getattr(namespace.get(name), "spec", None) for name in names):
        if isinstance(spec, RegionSpec) and (spec.objects or orders_others(spec)):
            advice = "torch._inductor.config.graph_partition = True splits that off"
            raise Unprovable("streams", f"it has to order the caller's streams; {advice}")


def orders_others(spec: RegionSpec) -> bool:
    """True if a side stream has to wait at the region's exit, or an event is recorded on one at the entry."""
    waits = any(kind != OperationKind.RECORD and spec.streams[stream] >= 0 for kind, _, stream in spec.exit)
    return waits or any(kind == OperationKind.RECORD_ENTRY for kind, *_ in spec.entry)
