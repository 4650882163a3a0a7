"""Find the streams that may still use what a region returns when its holder frees it.

A gradient in a side stream's memory is read by the caller's stream and freed by whoever holds it last, maybe when the
side stream has run far ahead. Autograd's engine records the reading stream where it moves a gradient from stream to
stream; here it does not see that the gradient moves. Whoever calls a nested region takes its results for memory of the
stream of the call. A result of a forward may be memory of another stream than in
eager, as that of an update in place is: whoever drops it counts on the stream that it has in eager. Code that is to be
captured also runs uncaptured: the first time, and whenever no graph can be had.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._dynamo import compiled_autograd
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.ids import callers_device, callers_stream_index
from torch_overlay._inductor.schedule_notes import notes_of
from torch_overlay._inductor.scheduler_nodes import owner_of
from torch_overlay._inductor.streams.graph_facts import eager_memory_of_results


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch._inductor.scheduler import Scheduler

    from torch_overlay._inductor.streams.planned_region import Region


def users_of_results(scheduler: Scheduler, region: Region) -> Iterator[tuple[str, int]]:
    """Yield buffers that the graph returns, each with a stream to be recorded on it (`record_stream`), beside the one
    that it was allocated on. The region that makes a value does so: in another one, such as that which allocates the
    memory that it is a view of, it may have no name.
    """
    made = {name for node in region.index for name in node.get_buffer_names()}
    yield from ((name, stream) for name, stream in _users_of_results(scheduler, region) if name in made)


def _users_of_results(scheduler: Scheduler, region: Region) -> Iterator[tuple[str, int]]:
    if V.graph.name is not None or V.graph.is_backward or compiled_autograd.in_compiled_autograd_region:
        yield from _callers_of_side_streams(scheduler)
        return
    memory = _memory(scheduler)
    for name, known in eager_memory_of_results().items():
        stream = memory.get(owner_of(name))
        for other in sorted(known) if stream is not None else ():
            other = region.numbers.get(other, other) or _callers_stream_of(name)
            if other != stream and other not in region.private:
                yield name, other


def _callers_of_side_streams(scheduler: Scheduler) -> Iterator[tuple[str, int]]:
    real = scheduler.mutation_real_name
    names: Any = dict.fromkeys(real.get(n, n) for n in V.graph.get_output_names())
    memory = _memory(scheduler)
    for name in names:
        stream = memory.get(owner_of(name))
        if stream is not None and name not in V.graph.graph_inputs and callers_device(stream) is None:
            yield name, _callers_stream_of(name)


def _memory(scheduler: Scheduler) -> Mapping[str, int]:
    """Return the stream whose memory each buffer is. A region may return, under a new name, what an earlier one
    allocated.
    """
    return notes_of(scheduler).memory or {}


def _callers_stream_of(name: str) -> int:
    device: Any = V.graph.get_buffer(name).get_device()
    return callers_stream_index(device.index or 0)
