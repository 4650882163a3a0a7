"""Order work after the copies that write updates of inputs back, where autograd has to see the updates.

The graph returns the new value of an input that needs a gradient and is updated in place, and AOTAutograd's epilogue
copies it into the input, on the caller's stream, when the graph's code has returned. The caller's stream has waited for
the update by then (`_promise_outputs`). What eager orders after the update itself must come after that copy: a stream
that waited for the update or made it, and the host, wait once more, and an event is recorded once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.facts import add_before, fact_of
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, written_index
from torch_overlay._functorch.streams.tokens import CALLER, state, streams_of


if TYPE_CHECKING:
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


def promises_of(gm: GraphModule, count: int) -> Promises | None:
    """Return the promises of the first `count` outputs, which the epilogue writes back; None if there are none."""
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
    if not (streams or events or host):
        return None
    devices = {written_index(v.meta["val"].device.index or 0) for v in values if v.meta["val"].device.type == "cuda"}
    return Promises(tuple(sorted(devices)), tuple(sorted(streams)), tuple(sorted(events)), host)


def _promise_outputs(values: list[Node]) -> None:
    """Order the caller's stream after the values: the caller writes them back on its own stream."""
    for value in values:
        if node_stream(value) != CALLERS_STREAM:
            add_before(value, (CALLER,))


__all__ = ["promises_of", "Promises"]
