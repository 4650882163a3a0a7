"""What upstream's users reported, forward programs: each is named after what went wrong."""

from typing import Any

import torch

from stream_programs._program import (
    built,
    fork,
    join,
    joins_all,
    Kit,
    matrices,
    program,
    reads_input,
    tensors,
    whole_numbers,
)
from stream_programs.compute import region_with_a_stream


# ---- mutation of inputs


@program(
    "the write-back of a mutation comes after the user's join: the caller reads the old input (#197416)",
    finish=reads_input,
)
def mutation_joined_by_wait_stream(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        x.add_(sleep(x))
    join(side)
    return x.new_ones(4)


@program("the same, joined by an event recorded after the mutation (#177576)", finish=reads_input)
def mutation_joined_by_event(side, done: torch.cuda.Event, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        x.mul_(3)
        x.add_(sleep(x))
        done.record()
    done.wait()
    return x.new_ones(4)


@program("the same, joined by the host", finish=reads_input, host_reads=True)
def mutation_joined_by_synchronize(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        x.add_(sleep(x))
    side.synchronize()
    return x.new_ones(4)


@program(
    "an event of the caller, recorded after a mutation: it must cover the write-back (#177576, #177577, #177580)",
    tensors(whole_numbers(64, 64), lambda device, generator: torch.cuda.Event()),
    finish=lambda instance, inputs, outputs: (inputs[1].wait(), outputs, inputs[0].clone()),
)
def mutation_promised_by_escaping_event(side, sleep, /, x, done):
    fork(side)
    with torch.cuda.stream(side):
        x.add_(sleep(x))
        done.record()
    return x.new_ones(4)


@program(
    "the stream that mutates is returned, and joined by the caller (#195573, review)",
    finish=lambda instance, inputs, outputs: (join(outputs), inputs[0].clone()),
)
def mutation_on_returned_stream(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        x.add_(sleep(x))
    return side


@program(
    "a KV cache updated in place, then a forked layer with private events: refused, or a race (#195573)",
    tensors(
        whole_numbers(4, 32, 16),
        whole_numbers(4, 1, 16),
        lambda device, generator: torch.randint(0, 32, (1,), generator=generator).to(device),
    ),
    finish=reads_input,
)
def kv_cache_then_forked_layer(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, k.parameter(16, 16)

    def fn(cache, token, position):
        fork, join = torch.cuda.Event(), torch.cuda.Event()
        cache.index_copy_(1, position, sleep(token))
        fork.record()
        with torch.cuda.stream(side):
            fork.wait()
            gate = sleep(token) @ weight
            join.record()
        scores = (cache * token).sum(-1, keepdim=True)
        join.wait()
        return scores * gate

    return fn


@program("an input mutated on one stream after another stream read it: write after read", finish=reads_input)
def input_read_then_mutated(reader, writer, sleep, /, x):
    fork(reader)
    with torch.cuda.stream(reader):
        a = sleep(x.clone()) @ x
    writer.wait_stream(reader)
    with torch.cuda.stream(writer):
        x.mul_(5)
    join(writer)
    return a


@program("an operator that works in place overtakes the other stream's reader (sglang #29142)", matrices(2))
def in_place_operator_and_second_reader(side, sleep, /, x, y):
    hidden = x + 1
    fork(side)
    with torch.cuda.stream(side):
        shared = sleep(hidden.clone()) @ hidden
    join(side)
    torch.ops.overlay_test.add_to(hidden, sleep(y))
    return shared + hidden


# ---- events and waits


@program("one event, two streams that wait for it: the second one's wait comes too late (#193409)")
def two_consumers_of_one_event(first, second, sleep, /, x):
    ready = torch.cuda.Event()
    y = sleep(x) + 1
    ready.record()
    with torch.cuda.stream(first):
        ready.wait()
        a = y * 2
    with torch.cuda.stream(second):
        ready.wait()
        b = y * 3
    join(first, second)
    return a + b


@program("wait_stream has only numbers for arguments and is scheduled first (#185546)", matrices(2))
def wait_stream_is_not_first(side, sleep, /, x, y):
    before = sleep(y) * 3
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(before) @ x
    independent = y + 7
    join(side)
    after = a + before
    return after, independent


def _waits_for_both(instance, inputs, outputs):
    first, second = inputs[1:]
    second.wait()
    value = outputs[1].clone()
    first.wait()
    return outputs[0], value


@program(
    "two records in a row, and two blocks of one stream, are unordered (#189096, review)",
    tensors(whole_numbers(64, 64), *[lambda device, generator: torch.cuda.Event()] * 2),
    finish=_waits_for_both,
)
def records_in_a_row(side, sleep, /, x, first, second):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        first.record()
    with torch.cuda.stream(side):
        b = sleep(x) * 3
        first.record()
        second.record()
    return a, b


@program(
    "an event recorded between two pieces of work covers the first",
    finish=lambda instance, inputs, outputs: (
        outputs[1].wait(),
        outputs[0].clone(),
        joins_all(instance, inputs, outputs[2]),
    ),
)
def record_between_work(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        between = side.record_event()
        b = sleep(a) + 5
    return a, between, b


@program(
    "an event of the outside is waited for by a stream that does nothing else",
    tensors(whole_numbers(64, 64), lambda device, generator: torch.cuda.current_stream().record_event()),
)
def wait_without_other_work(side, other, sleep, /, x, ready):
    other.wait_event(ready)
    side.wait_stream(other)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
    join(side)
    return a + x


def _orders_later_work(instance, inputs, outputs):
    with torch.cuda.stream(instance.streams[0]):
        seen = outputs.clone()
    torch.cuda.current_stream().wait_stream(instance.streams[0])
    return seen


@program("a side stream that waits at the end holds back the caller's later work on it", finish=_orders_later_work)
def side_stream_waits_at_exit(side, sleep, /, x):
    a = sleep(x) @ x
    fork(side)
    return a


@program("the order of work between two side streams, promised to the caller by a third", finish=joins_all)
def chain_of_streams(one, two, three, four, sleep, /, x):
    previous = torch.cuda.current_stream()
    for side in (one, two, three, four):
        side.wait_stream(previous)
        with torch.cuda.stream(side):
            x = sleep(x) * 2 + 1
        previous = side
    return x


# ---- memory


@program("a pointwise producer of one stream is computed inside a kernel of another (#177324)")
def producer_not_inlined(side, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = x * 2 + 1
    join(side)
    b = a * 3 - x
    fork(side)
    with torch.cuda.stream(side):
        c = b + a
    join(side)
    return c - 1


def _sometimes_misaligned(device: str, generator: torch.Generator) -> torch.Tensor:
    """Aligned when the program is compiled, and at every third call an address that no vector load may use."""
    offset = 1 if generator.initial_seed() % 3 == 2 else 0
    base = torch.randint(-2, 3, (64 * 64 + 4,), generator=generator).float().to(device)
    return base[offset : offset + 64 * 64].view(64, 64)


MISALIGNED = tensors(_sometimes_misaligned)


@program("a misaligned input that several streams read is realigned once, on one of them (#187224)", MISALIGNED)
def misaligned_input_of_two_streams(first, second, sleep, /, x):
    fork(first, second)
    with torch.cuda.stream(first):
        a = sleep(x) * 2
    with torch.cuda.stream(second):
        b = sleep(x) + 3
    c = x.sum(0)
    join(first, second)
    return a + b + c


def loaded(source: torch.Tensor, side: torch.cuda.Stream, sleep: Any) -> torch.Tensor:
    """A copy of an input that is made on `side`, in memory of its own, aligned as the input is."""
    fork(side)
    with torch.cuda.stream(side):
        offset = source.storage_offset()
        copy = torch.empty(offset + source.numel(), device=source.device)[offset:].view(source.shape)
        return copy.copy_(sleep(source))


def on_loaded(hazard: str, behind_an_event: bool = False) -> Any:
    """Decorates a step, which is compiled: the caller fills its input on the first stream, and may hand on an event."""

    def register(step: Any) -> Any:
        def build(k: Kit) -> Any:
            compiled = k.compile(built(step)(k))

            def fn(source):
                x = loaded(source, k.streams[0], k.sleep)
                return compiled(x, k.streams[0].record_event()) if behind_an_event else compiled(x)

            return fn

        build.__name__, build.__module__ = step.__name__, step.__module__
        return program(hazard, MISALIGNED, frames=True)(build)

    return register


@on_loaded("a misaligned input is copied where record_stream names it, before the wait for it", behind_an_event=True)
def misaligned_prefetch_behind_an_event(side, /, x, ready):
    current = torch.cuda.current_stream()
    current.wait_event(ready)
    x.record_stream(current)
    return x * 2


@on_loaded("a misaligned input is copied for one of its readers, before the others' waits")
def misaligned_prefetch_of_several_streams(side, other, sleep, /, x):
    current = torch.cuda.current_stream()
    current.wait_stream(side)
    x.record_stream(current)
    other.wait_stream(current)
    x.record_stream(other)
    with torch.cuda.stream(other):
        a = sleep(x).sum(0)
    b = sleep(x) * 3
    with torch.cuda.stream(side):
        c = x @ x
    join(other, side)
    c.record_stream(current)
    return a + b + c


@on_loaded("record_stream of a misaligned input speaks of the copy, after its reader")
def misaligned_prefetch_recorded_at_the_end(side, sleep, /, x):
    current = torch.cuda.current_stream()
    current.wait_stream(side)
    y = sleep(x.view(torch.int32).view(torch.float32)) + x
    x.view(-1)[1:].record_stream(current)
    return y


@program("a misaligned input that is updated is copied before the wait for it", MISALIGNED, frames=True)
def misaligned_input_is_updated_behind_a_wait(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    @k.compile
    def step(x, ready):
        current = torch.cuda.current_stream()
        current.wait_event(ready)
        x.record_stream(current)
        x.mul_(2)
        return sleep(x) + 1

    def fn(source):
        x = loaded(source, side, sleep)
        result = step(x, side.record_event())
        return result, x.clone()

    return fn


@program("a misaligned input is written back after the event that says it is updated", MISALIGNED, frames=True)
def misaligned_input_is_updated_on_a_side_stream(k: Kit) -> Any:
    side, done, sleep = k.stream(), torch.cuda.Event(), k.sleep

    @k.compile
    def step(x):
        fork(side)
        with torch.cuda.stream(side):
            x.add_(sleep(x))
            done.record(side)

    def fn(x):
        step(x)
        torch.cuda.current_stream().wait_event(done)
        return x * 2

    return fn


@program("streams read and update a misaligned input in turn, each from a copy of its own", MISALIGNED)
def misaligned_input_is_updated_by_two_streams(first, second, sleep, /, x):
    fork(first)
    with torch.cuda.stream(first):
        a = sleep(x).sum(0)
        x[1:3] += 1
    second.wait_stream(first)
    with torch.cuda.stream(second):
        b = sleep(x) @ x
        x.mul_(2)
    first.wait_stream(second)
    with torch.cuda.stream(first):
        c = sleep(x).sum(1)
    join(first)
    return a + b + c


@program("Tensor.record_stream is an error about alias annotations (ai-toolkit #1012)")
def record_stream_on_intermediate(side, sleep, /, x):
    current = torch.cuda.current_stream()
    h = sleep(x) * 2
    side.wait_stream(current)
    with torch.cuda.stream(side):
        a = sleep(h) + 1
        h.record_stream(side)
        x.record_stream(side)
    del h
    current.wait_stream(side)
    a.record_stream(current)
    return a


@program(
    "an input freed by the caller while the side stream still reads it, protected by record_stream", finish=joins_all
)
def input_protected_by_record_stream(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x.clone()) @ x
    x.record_stream(side)
    return a


@program(
    "the current stream waits for a side stream's own work, which only another side stream reads", finish=joins_all
)
def stream_joined_before_its_result_is_read(first, second, sleep, /, x):
    fork(first)
    with torch.cuda.stream(first):
        a = sleep(x) + 1
        b = a @ a
    join(first)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        c = b @ b
    return c


# ---- passes that lose the stream


@program(
    "online softmax in front of a matmul loses its stream in the pattern replacement (#189095)",
    tensors(whole_numbers(64, 512), whole_numbers(512, 64)),
    tolerance=1e-4,
)
def softmax_then_matmul(side, sleep, /, x, y):
    fork(side)
    with torch.cuda.stream(side):
        a = torch.softmax(sleep(x), -1) @ y
    b = torch.relu(x)
    join(side)
    return a + b[:, :64]


@program("attention written out is replaced by a fused operator", matrices(3, 32), tolerance=1e-4)
def attention_pattern(side, sleep, /, q, key, v):
    q, key, v = (t.view(2, 2, 16, 16) for t in (q, key, v))
    fork(side)
    with torch.cuda.stream(side):
        a = torch.softmax(sleep(q) @ key.transpose(-2, -1) / 4.0, -1) @ v
    b = v * 2
    join(side)
    return a + b


@program(
    "two dropouts have no edge between them: another order gives other masks (#192635)",
    options={"fallback_random": True},
    random=True,
)
def dropouts_on_side_stream(side, sleep, /, x):
    a = torch.nn.functional.dropout(x, 0.5)
    fork(side)
    with torch.cuda.stream(side):
        b = torch.nn.functional.dropout(sleep(x), 0.5)
        c = torch.nn.functional.dropout(b, 0.25)
    d = torch.nn.functional.dropout(a, 0.5)
    join(side)
    return a + 2 * b, c, d


# ---- several frames, several devices


@program("two compiled frames in one step overwrite each other's streams (#186025)", frames=True)
def two_frames_in_one_step(k: Kit) -> Any:
    first, second, sleep = k.stream(), k.stream(), k.sleep

    @k.compile
    def encode(x):
        fork(first)
        with torch.cuda.stream(first):
            a = sleep(x) * 2
        done = first.record_event()
        return a, done

    @k.compile
    def decode(a, done):
        second.wait_event(done)
        with torch.cuda.stream(second):
            b = sleep(a) + 1
        join(second)
        return b

    return lambda x: decode(*encode(x))


@program("the current stream at run time is another one than while tracing (#180396, #186023)", frames=True)
def called_under_another_stream(k: Kit) -> Any:
    side, caller, sleep = k.stream(), k.stream(), k.sleep

    @k.compile
    def inner(x):
        x = sleep(x + 1)
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x) @ x
        b = x * 2
        join(side)
        return a + b

    def step(x):
        first = inner(x).clone()
        fork(caller)
        with torch.cuda.stream(caller):
            second = inner(x).clone()
        join(caller)
        return first - 2 * second

    return step


@program(
    "on cuda:1 the raw handle overwrites the user's stream of the same name (#182084)",
    tensors(whole_numbers(64, 64, on="cuda:1")),
    devices=2,
)
def aux_stream_of_second_device(k: Kit) -> Any:
    side, sleep = k.stream(device="cuda:1"), k.sleep

    def fn(x):
        with torch.cuda.device(1):
            current = torch.cuda.current_stream()
            for _ in range(2):
                x = sleep(x) + 1
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    a = sleep(x) * 2
                current.wait_stream(side)
                x = a + x
        return x

    return fn


@program(
    "streams of two devices in one graph", tensors(whole_numbers(64, 64), whole_numbers(64, 64, on="cuda:1")), devices=2
)
def streams_of_two_devices(k: Kit) -> Any:
    near, far, sleep = k.stream(device="cuda:0"), k.stream(device="cuda:1"), k.sleep

    def fn(x, y):
        current = torch.cuda.current_stream("cuda:0")
        remote = torch.cuda.current_stream("cuda:1")
        near.wait_stream(current)
        far.wait_stream(remote)
        with torch.cuda.stream(near):
            a = sleep(x) * 2
        with torch.cuda.stream(far):
            b = sleep(y) * 3
        remote.wait_stream(far)
        current.wait_stream(near)
        c = b.to("cuda:0")
        return a + c

    return fn


@program(
    "a copy between devices orders their current streams, of which the function names none",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, on="cuda:1")),
    devices=2,
)
def copy_from_another_device(side, sleep, /, x, y):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
    join(side)
    return a + y.to("cuda:0")


# ---- between CUDA graphs

_WITH_HOST_MEMORY = tensors(whole_numbers(64, 64), whole_numbers(64, 64), whole_numbers(64, 64, pinned=True))


@program(
    "a side stream that was ordered between graphs is not ordered after its work in the next one",
    _WITH_HOST_MEMORY,
    finish=joins_all,
)
def side_stream_updates_behind_a_copy_between_graphs(side, sleep, /, x, state, host):
    fork(side)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
        state.add_(sleep(x))
    return x * 2


@program("the same, of the current stream's work, for which the side stream waits", _WITH_HOST_MEMORY, finish=joins_all)
def side_stream_waits_behind_a_copy_between_graphs(side, sleep, /, x, state, host):
    fork(side)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    state.add_(sleep(x))
    fork(side)
    return x * 2


@program(
    "the same, of a nested region that reads an input on the side stream",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, low=-1, high=1), whole_numbers(64, 64, pinned=True)),
    finish=joins_all,
)
def nested_region_behind_a_copy_between_graphs(k: Kit) -> Any:
    side = k.stream()
    block = region_with_a_stream(k, side)

    def fn(x, y, host):
        fork(side)
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
        return block(block(y)) * 2

    return fn


@program(
    "a side stream that is forked for a graph too small to capture is forked again for what follows",
    tensors(whole_numbers(64, 64), whole_numbers(64, 64, pinned=True)),
    options={"triton.cudagraph_min_partition_size": 8},
    finish=joins_all,
)
def graph_too_small_to_capture(side, sleep, /, x, host):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        host.copy_(a, non_blocking=True)
        b = a @ a
    join(side)
    return b


# ---- memory of results


@program("the result of an update on another stream: in eager it is the current stream's memory", late_reader="current")
def result_updated_elsewhere(side, sleep, /, x):
    h = sleep(x) * 2
    fork(side)
    with torch.cuda.stream(side):
        h.mul_(3)
    join(side)
    return h


@program("the same of an update that reads nothing, and of a part", late_reader="current")
def result_filled_elsewhere(side, sleep, /, x):
    h, part = sleep(x) * 2, sleep(x) * 4
    fork(side)
    with torch.cuda.stream(side):
        h.fill_(7)
        part[1:].add_(1)
    join(side)
    return h, part


@program("a result of a side stream that is read there: in eager it is that stream's memory", late_reader="side")
def result_of_its_reader(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        y = sleep(x) + 1
    join(side)
    return y


@program("a result of one side stream that another one updates is the first one's memory", late_reader="side")
def result_updated_on_another_side_stream(first, second, sleep, /, x):
    fork(first)
    with torch.cuda.stream(first):
        y = sleep(x) + 1
    second.wait_stream(first)
    with torch.cuda.stream(second):
        y.mul_(2)
    first.wait_stream(second)
    join(first)
    return y
