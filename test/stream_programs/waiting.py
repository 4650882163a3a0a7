"""Programs in which the host waits or asks, and copies between host and device.

What the host reads must have arrived: these programs do the waiting that eager needs, no more, and a compiler that
moves a synchronisation in front of the work that it waits for hands stale host memory on.
"""

from typing import Any

import torch

from stream_programs._program import fork, join, joins_all, Kit, program, synchronizes, tensors, whole_numbers


# ---- host synchronisation


@program("the host reads a pinned copy before its event has happened (#189096)", host_reads=True)
def event_synchronize_before_host_read(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        host = a.to("cpu", non_blocking=True)
        arrived = side.record_event()
    arrived.synchronize()
    return host + 1


@program("the host reads a pinned copy before the stream is done (#189096)", host_reads=True)
def stream_synchronize_before_host_read(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        host = (sleep(x) * 2).to("cpu", non_blocking=True)
    side.synchronize()
    return host + 1


@program("the host reads a pinned copy before the device is done (#189096)", host_reads=True)
def device_synchronize_before_host_read(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        host = (sleep(x) * 2).to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return host + 1


@program(
    "a synchronisation at the end promises the caller's host that a copy into its memory has arrived",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, pinned=True)),
    finish=lambda instance, inputs, outputs: inputs[1].clone(),
    host_reads=True,
)
def synchronized_copy_into_input(side, sleep, /, x, host):
    fork(side)
    with torch.cuda.stream(side):
        host.copy_(sleep(x) * 2, non_blocking=True)
    side.synchronize()
    return x + 1


@program("a query is answered while tracing; it must be the run's answer", host_reads=True)
def queries_after_synchronize(side, done: torch.cuda.Event, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        done.record()
    side.synchronize()
    return a, done.query(), side.query()


@program(
    "elapsed_time inside the graph comes from the run",
    finish=lambda instance, inputs, outputs: (outputs[0], 0.0 < outputs[1] < 60_000.0),
    host_reads=True,
)
def elapsed_time_inside(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def fn(x):
        fork(side)
        with torch.cuda.stream(side):
            start.record()
            a = sleep(x) @ x
            end.record()
        end.synchronize()
        return a, start.elapsed_time(end)

    return fn


def _asks_elapsed_time(instance, inputs, outputs):
    value, start, end = outputs
    torch.cuda.current_stream().wait_event(end)
    end.synchronize()
    return value, 0.0 < start.elapsed_time(end) < 60_000.0


@program(
    "timing events made in the graph and read outside are other events, never recorded (#185594)",
    finish=_asks_elapsed_time,
)
def elapsed_time_outside(side, sleep, /, x):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    fork(side)
    with torch.cuda.stream(side):
        start.record()
        a = sleep(x) @ x
        end.record()
    return a, start, end


@program("a branch on a query breaks the graph, and says why", fullgraph=False, host_reads=True)
def branch_on_query(k: Kit) -> Any:
    side, sleep, done = k.stream(), k.sleep, torch.cuda.Event()

    def fn(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x) * 2
            done.record()
        done.synchronize()
        if done.query():
            return a + 1
        return a - 1

    return fn


@program("a number read from the device inside a side stream", fullgraph=False, host_reads=True)
def item_on_side_stream(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    def fn(x):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            n = int(sleep(x).abs().max().item())
            a = x * n
        current.wait_stream(side)
        return a + n

    return fn


def _size_on_side_stream(k: Kit) -> Any:
    """Sizes that depend on data, of values of the side stream, read there and by the caller's."""
    side, sleep = k.stream(), k.sleep

    def fn(x):
        fork(side)
        with torch.cuda.stream(side):
            y = sleep(x).abs()
            places = y.nonzero()
            largest = y[y > 1]
            ones = y.new_ones(y.amax().long().item())
        b = x * 2
        join(side)
        return places + 1, largest.sum() + b, ones * 2

    return fn


@program("a size that depends on data on a side stream, in one graph", host_reads=True)
def size_on_side_stream(k: Kit) -> Any:
    return _size_on_side_stream(k)


@program("the same under default settings: graph breaks inside the stream's block", fullgraph=False, host_reads=True)
def size_on_side_stream_breaks(k: Kit) -> Any:
    return _size_on_side_stream(k)


@program("the host waits again for a copy of an earlier graph, and for all that came after it", host_reads=True)
def download_behind_an_event_of_an_earlier_graph(sleep, /, x):
    host = x.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    y = sleep(x) * 2
    done.synchronize()
    return host + 1, y


# ---- copies


@program(
    "a pinned host tensor copied on a side stream doesn't compile: default_stream unbound",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, pinned=True)),
)
def pinned_to_device(side, sleep, /, x, batch):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(batch.to("cuda", non_blocking=True))
    b = x * 2
    join(side)
    return a @ b


@program("a device tensor copied to the host on a side stream: the caller waits", finish=synchronizes, host_reads=True)
def device_to_pinned(side, sleep, /, x):
    a = sleep(x) @ x
    fork(side)
    with torch.cuda.stream(side):
        host = a.to("cpu", non_blocking=True)
    return host, a + 1


@program(
    "copies both ways, host memory of the caller as source and as target",
    tensors(whole_numbers(64, 64, pinned=True), whole_numbers(64, 64, pinned=True)),
    finish=lambda instance, inputs, outputs: (synchronizes(instance, inputs, outputs), inputs[1].clone()),
    host_reads=True,
)
def copies_both_ways(upload, download, sleep, /, batch, result):
    fork(upload)
    with torch.cuda.stream(upload):
        x = sleep(batch.to("cuda", non_blocking=True))
    join(upload)
    y = x @ x
    fork(download)
    with torch.cuda.stream(download):
        result.copy_(sleep(y), non_blocking=True)
    join(download)
    return y + 1


@program(
    "work on the CPU in the same graph: between a blocking copy to the host and one back",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, on="cpu")),
    host_reads=True,
)
def cpu_work_between(side, sleep, /, x, h):
    fork(side)
    with torch.cuda.stream(side):
        a = (sleep(x) * 2).cpu()
    b = (a + h) * 3
    with torch.cuda.stream(side):
        c = b.to("cuda") + x
    join(side)
    return c, h + 1


@program(
    "a host tensor made inside a stream's block, in a graph without a device buffer: names that don't exist (#194234)",
    tensors(whole_numbers(8, 8, on="cpu")),
)
def only_cpu_work_in_stream(side, /, h):
    with torch.cuda.stream(side):
        a = h * 2
    join(side)
    return a + torch.ones(8, 8)


@program("a constant returned after wait_stream: names that don't exist (#194234)", tensors())
def constant_after_wait(side, /):
    join(side)
    return 3


# ---- prefetch


@program(
    "a prefetch that doesn't wait for the current stream must not begin to: the copy would no longer overlap",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, pinned=True)),
)
def prefetch_without_waiting(copies, sleep, /, x, batch):
    current = torch.cuda.current_stream()
    with torch.cuda.stream(copies):
        loaded = batch.to("cuda", non_blocking=True)
        prepared = sleep(loaded) * 2
    b = x * 3
    current.wait_stream(copies)
    loaded.record_stream(current)
    prepared.record_stream(current)
    return prepared + b


@program(
    "the chapter's loop: while one batch is computed the next one is copied",
    tensors(*[whole_numbers(64, 64, pinned=True, low=-1, high=1)] * 4),
)
def prefetch_loop(copies, weight: torch.Tensor, sleep, /, *batches):
    current = torch.cuda.current_stream()
    total = torch.zeros(64, 64, device="cuda")

    def load(batch):
        with torch.cuda.stream(copies):
            return sleep(batch.to("cuda", non_blocking=True)), copies.record_event()

    ahead = load(batches[0])
    for i in range(len(batches)):
        x, arrived = ahead
        if i + 1 < len(batches):
            ahead = load(batches[i + 1])
        current.wait_event(arrived)
        x.record_stream(current)
        total = total + (x @ weight).relu()
    return total


@program(
    "the prefetched batch is returned unjoined, for the next call",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, pinned=True)),
    finish=joins_all,
)
def prefetch_for_next_call(copies, weight: torch.Tensor, sleep, /, x, batch):
    fork(copies)
    with torch.cuda.stream(copies):
        ahead = sleep(batch.to("cuda", non_blocking=True))
    return (x @ weight).relu(), ahead


@program(
    "host memory copied from while the caller may refill it: it may only after the event",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, pinned=True)),
    finish=lambda instance, inputs, outputs: (inputs[1].fill_(100), outputs),
    host_reads=True,
)
def source_refilled_after_event(copies, done: torch.cuda.Event, sleep, /, x, batch):
    current = torch.cuda.current_stream()
    copies.wait_stream(current)
    with torch.cuda.stream(copies):
        a = sleep(x + 0).copy_(batch, non_blocking=True)
        done.record()
    current.wait_event(done)
    done.synchronize()
    return a + x
