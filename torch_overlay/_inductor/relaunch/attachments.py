"""Tells captures about the streams of compiled code, and about saved activations in host memory, which know nothing of
captures: Note [Streams of a capture] of `capture.recording`."""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.offload import runtime
from torch_overlay._inductor.relaunch.capture.allocations import namespace_of
from torch_overlay._inductor.relaunch.capture.recording import CALLERS, checks, exchanges, names_in
from torch_overlay._inductor.relaunch.keys import Keeper, keepers
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay._inductor.streams.region_spec import OperationKind, RegionSpec


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_overlay._inductor.relaunch.capture.recording import Instead


def exchanged_copy_streams(instead: Instead) -> contextlib.AbstractContextManager[None]:
    return runtime.exchanged(lambda number: instead(("copies", number)))


@contextlib.contextmanager
def exchanged_objects(instead: Instead) -> Iterator[None]:
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


def check_streams(model: Any) -> None:
    """Refuse a region that has to order streams of the caller's. A partition orders its side streams against the
    caller's stream alone, and the code around the partition orders them against other streams. Code that is not
    partitioned does both itself."""
    namespace = namespace_of(model)
    for name in names_in(model):
        spec = getattr(namespace.get(name), "spec", None)
        if isinstance(spec, RegionSpec) and (spec.objects or _orders_others(spec)):
            message = (
                "it has to order the caller's streams; torch._inductor.config.graph_partition = True splits that off"
            )
            raise Unprovable("streams", message)


def _orders_others(spec: RegionSpec) -> bool:
    """True if a side stream has to wait at the region's exit, or an event is recorded on one at the entry."""
    waits = any(kind != OperationKind.RECORD and spec.streams[stream] >= 0 for kind, _, stream in spec.exit)
    return waits or any(kind == OperationKind.RECORD_ENTRY for kind, *_ in spec.entry)


def attach() -> None:
    """Have every capture of this process replace these streams, every graph keep addresses of slabs, and no code that
    orders the caller's streams captured."""
    checks[:] = [check_streams]
    exchanges[:] = [exchanged_copy_streams, exchanged_objects]
    keepers[:] = [Keeper(runtime.holds, lambda tensor: runtime.identity(tensor) if runtime.is_slab(tensor) else None)]
