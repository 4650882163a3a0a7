"""Order work after the copies that write updates of inputs back, where autograd has to see the updates.

The graph returns the new value of an input that needs a gradient and is updated in place, and AOTAutograd's epilogue
copies it into the input, on the caller's stream, when the graph's code has returned. The caller's stream has waited for
the update by then (`_promise_outputs`). What eager orders after the update itself must come after that copy: a stream
that waited for the update or made it, and the host, wait once more, and an event is recorded once more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.facts import add_before, fact_of
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, written_index
from torch_overlay._functorch.streams.tokens import CALLER, state, streams_of


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Promises:
    """The work that must come after the epilogue's copies, by registry index: streams, and events with the streams that
    record them.
    """

    devices: tuple[int, ...]  # on whose current streams the copies run, as `ids.written_index` has them
    streams: tuple[int, ...]
    events: tuple[tuple[int, int], ...]
    host: bool

    def keep(self) -> None:
        """Make streams and the host wait for the copies, and record the events again. This runs after the copies, with
        the objects of the graph's call.
        """
        copied = [objects.callers_stream(device) for device in self.devices]
        for index in self.streams:
            for stream in copied:
                objects.get(index).wait_stream(stream)
        for event, index in self.events:
            objects.get(event).record(objects.get(index))
        if self.host:
            for stream in copied:
                stream.synchronize()


def note_promises(gm: GraphModule, fw_metadata: Any, count: int) -> None:
    """Note the promises of the first `count` outputs, which the epilogue writes back."""
    outputs: Any = gm.graph.output_node().args[0]
    values = [value for value in outputs[:count] if isinstance(value, torch.fx.Node)]
    _promise_outputs(values)
    last = {
        n.args[0]: n for n in gm.graph.find_nodes(op="call_function", target=torch.ops.streams.record_event.default)
    }
    records = {fact_of(n).requires: (event, n.args[1]) for event, n in last.items()}
    tokens = {t for v in values for t in (state(node_stream(v)), *fact_of(v).promises)}
    streams = streams_of(tokens) - {CALLERS_STREAM}
    events = {records[t] for t in tokens if t in records}
    host = any(t.is_blocking_copy or t.is_synchronization for t in tokens)
    if streams or events or host:
        devices = {
            written_index(v.meta["val"].device.index or 0) for v in values if v.meta["val"].device.type == "cuda"
        }
        promises = Promises(tuple(sorted(devices)), tuple(sorted(streams)), tuple(sorted(events)), host)
        fw_metadata.overlay_promises = promises


def _promise_outputs(values: list[Node]) -> None:
    """Order the caller's stream after the values: the caller writes them back on its own stream."""
    for value in values:
        if node_stream(value) != CALLERS_STREAM:
            add_before(value, (CALLER,))


# ---- seam


def create_runtime_wrapper(
    original: Callable[..., Callable[..., Any]], compiled_fn: Any, *, runtime_metadata: Any, **kwargs: Any
) -> Callable[..., Any]:
    wrapper = original(compiled_fn, runtime_metadata=runtime_metadata, **kwargs)
    promises: Promises | None = getattr(runtime_metadata, "overlay_promises", None)
    if promises is None:
        return wrapper

    @functools.wraps(wrapper)
    def keep_promises(*args: Any, **kwargs: Any) -> Any:
        result = wrapper(*args, **kwargs)
        promises.keep()
        return result

    return keep_promises


__all__ = ["create_runtime_wrapper", "note_promises", "Promises"]
