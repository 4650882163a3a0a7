"""Every way to make, hold, enter, ask and pass streams and events."""

from typing import Any

import torch

from stream_programs._program import fork, join, Kit, matrices, program, tensors, whole_numbers


SIDE: Any = None  # the stream of `stream_as_global`
FORK: Any = None  # and its event


def _branch(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu()


# ---- where streams come from


@program("the plain fork and join")
def fork_join(side, sleep, /, x):
    current = torch.cuda.current_stream()
    x = sleep(x + 1)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        a = _branch(sleep(x))
    b = x * 2
    current.wait_stream(side)
    return a + b


@program("torch.Stream and torch.accelerator are not seen as streams")
def generic_stream_outside(side: torch.Stream, sleep, /, x):
    current = torch.accelerator.current_stream()
    x = sleep(x + 1)
    side.wait_stream(current)
    with side:
        a = _branch(sleep(x))
    b = x * 2
    current.wait_stream(side)
    return a + b


@program("torch.Stream made inside, with a device")
def generic_stream_made_inside(sleep, /, x):
    current = torch.accelerator.current_stream()
    side = torch.Stream(device="cuda")
    other = torch.Stream(torch.device("cuda", 0))
    x = sleep(x + 1)
    side.wait_stream(current)
    other.wait_stream(current)
    with side:
        a = _branch(sleep(x))
    with other:
        b = sleep(x) * 3
    current.wait_stream(side)
    current.wait_stream(other)
    return a + b


@program("two streams made inside are taken for one")
def two_streams_made_inside(sleep, /, x):
    first, second = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    fork(first)
    with torch.cuda.stream(first):
        a = sleep(x) * 2
    second.wait_stream(first)
    with torch.cuda.stream(second):
        b = _branch(a)
    join(second)
    return b - x


@program("events made outside, recorded inside; wrong numbers under reduce-overhead (#180396, #176486)", matrices(2))
def events_made_outside(side, fork: torch.cuda.Event, join: torch.cuda.Event, sleep, /, x, y):
    x = sleep(x + 1)
    fork.record()
    with torch.cuda.stream(side):
        fork.wait()
        a = sleep(x @ x)
        join.record()
    b = (y + 3) * y
    join.wait()
    return a + b


@program("events made inside", matrices(2))
def events_made_inside(side, sleep, /, x, y):
    fork, join = torch.cuda.Event(), torch.cuda.Event()
    x = sleep(x + 1)
    fork.record()
    side.wait_event(fork)
    with torch.cuda.stream(side):
        a = sleep(x @ y)
        join.record(side)
    b = y * y
    torch.cuda.current_stream().wait_event(join)
    return a + b


@program("torch.Event made inside, with and without a device", matrices(2))
def generic_events_made_inside(side: torch.Stream, sleep, /, x, y):
    fork, join = torch.Event("cuda"), torch.Event()
    x = sleep(x + 1)
    fork.record()
    with side:
        fork.wait()
        a = sleep(x @ y)
        join.record()
    join.wait()
    return a + y


@program("Event(True) is called with the device in the place of enable_timing")
def timing_event_by_position(side, sleep, /, x):
    ready = torch.cuda.Event(True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        ready.record()
    ready.wait()
    return a + x


# ---- where they are held


@program(
    "a stream passed as an argument, another one at each call",
    tensors(whole_numbers(64, 64), lambda device, generator: torch.cuda.Stream()),
)
def stream_as_argument(sleep, /, x, side):
    x = sleep(x + 1)
    fork(side)
    with torch.cuda.stream(side):
        a = _branch(sleep(x))
    join(side)
    return a + x


def _sometimes_one_stream(device: str, generator: torch.Generator) -> tuple[Any, ...]:
    x = whole_numbers(64, 64)(device, generator)
    first = torch.cuda.Stream()
    kind = generator.initial_seed() % 3
    return x, first, (torch.cuda.Stream(), first, torch.cuda.current_stream())[kind]


@program("two streams of the caller are one stream, or the current one, at some calls", _sometimes_one_stream)
def streams_that_are_one(sleep, /, x, first, second):
    x = sleep(x + 1)
    fork(first)
    with torch.cuda.stream(first):
        a = _branch(sleep(x))
    second.wait_stream(first)
    with torch.cuda.stream(second):
        b = sleep(a) * 2
    c = x * 3
    join(second)
    return a + b + c


@program(
    "events of the caller: the record inside is what the caller waits for, the wait inside is for the caller's record",
    tensors(
        whole_numbers(64, 64),
        lambda device, generator: torch.cuda.current_stream().record_event(),
        lambda device, generator: torch.cuda.Event(),
    ),
    finish=lambda instance, inputs, outputs: (inputs[2].wait(), outputs),
)
def events_as_arguments(side, sleep, /, x, ready, done):
    with torch.cuda.stream(side):
        ready.wait()
        a = sleep(x) * 2
        done.record()
        x.record_stream(side)
    return a


class _Branches(torch.nn.Module):
    def __init__(self, k: Kit) -> None:
        super().__init__()
        self.side, self.sleep = k.stream(), k.sleep
        self.done = torch.cuda.Event()
        self.weight = torch.nn.Parameter(k.parameter(64, 64), requires_grad=False)

    def forward(self, x):
        x = self.sleep(x + 1)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            a = self.sleep(x) @ self.weight
            self.done.record()
        b = x * 2
        self.done.wait()
        return a + b


@program("a stream and an event held in a module")
def streams_in_module(k: Kit) -> Any:
    return _Branches(k)


@program("streams and events held in a list")
def streams_in_list(k: Kit) -> Any:
    streams, sleep = [k.stream() for _ in range(3)], k.sleep
    done = [torch.cuda.Event() for _ in streams]

    def fn(x):
        x = sleep(x + 1)
        out = []
        for i, (side, event) in enumerate(zip(streams, done)):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out.append(sleep(x) * (i + 2))
                event.record()
        for event in done:
            event.wait()
        return out[0] + out[1] + out[2]

    return fn


@program("streams held in a dict, found by name")
def streams_in_dict(k: Kit) -> Any:
    streams, sleep = {"copy": k.stream(), "compute": k.stream()}, k.sleep

    def fn(x):
        fork(streams["copy"])
        with torch.cuda.stream(streams["copy"]):
            a = sleep(x.clone())
        streams["compute"].wait_stream(streams["copy"])
        with torch.cuda.stream(streams["compute"]):
            b = _branch(a)
        join(streams["compute"])
        return b + x

    return fn


@program("a stream and an event as global variables")
def stream_as_global(k: Kit) -> Any:
    global SIDE, FORK
    SIDE, FORK = k.stream(), torch.cuda.Event()
    sleep = k.sleep

    def fn(x):
        x = sleep(x + 1)
        FORK.record()
        with torch.cuda.stream(SIDE):
            FORK.wait()
            a = _branch(sleep(x))
        torch.cuda.current_stream().wait_stream(SIDE)
        return a + x

    return fn


@program(
    "a stream made inside and returned: the caller joins it",
    finish=lambda instance, inputs, outputs: (join(outputs[1]), outputs[0]),
)
def stream_returned(sleep, /, x):
    side = torch.cuda.Stream()
    x = sleep(x + 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = _branch(sleep(x))
    return a, side


@program(
    "an event recorded inside and returned: it must be the recorded one (#185594)",
    finish=lambda instance, inputs, outputs: (outputs[1].wait(), outputs[0]),
)
def event_returned(side, sleep, /, x):
    x = sleep(x + 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = _branch(sleep(x))
        done = side.record_event()
    return a, done


@program(
    "streams and events inside returned containers",
    finish=lambda instance, inputs, outputs: (outputs["done"][0].wait(), outputs["value"]),
)
def event_returned_in_container(side, sleep, /, x):
    done = torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        done.record()
    return {"value": a, "done": [done], "side": side}


# ---- contexts


@program("`with s:` and `with torch.cuda.stream(s):` mean the same")
def with_stream_object(side, sleep, /, x):
    x = sleep(x + 1)
    fork(side)
    with side:
        a = sleep(x) * 2
    with torch.cuda.stream(side):
        b = _branch(a)
    join(side)
    return a + b


@program("torch.cuda.StreamContext, made inside and made before")
def stream_context_class(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    context = torch.cuda.stream(side)

    def fn(x):
        x = sleep(x + 1)
        fork(side)
        with torch.cuda.StreamContext(side):
            a = sleep(x) * 2
        with context:
            b = a + 1
        join(side)
        return a * b

    return fn


@program("stream(None) is an error (#196193); it means: stay where you are")
def stream_none(side, sleep, /, x):
    with torch.cuda.stream(None):
        x = sleep(x + 1)
    fork(side)
    with torch.cuda.stream(side), torch.cuda.stream(None):
        a = sleep(x) * 2
    join(side)
    return a + x


@program("leaving an inner context returns to the outer stream, not to the default one")
def nested_contexts(outer, inner, sleep, /, x):
    fork(outer)
    with torch.cuda.stream(outer):
        a = sleep(x) * 2
        inner.wait_stream(outer)
        with torch.cuda.stream(inner):
            b = sleep(a) + 1
        c = a * 3
        outer.wait_stream(inner)
        d = b + c
    join(outer)
    return d + x


@program("entering the stream that is current already makes it a side stream (prime-rl #3458)")
def reenter_current_stream(side, sleep, /, x):
    current = torch.cuda.current_stream()
    with torch.cuda.stream(current):
        x = sleep(x + 1)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        with torch.cuda.stream(side):
            b = a + 1
        with torch.cuda.stream(current):
            c = x * 5
    current.wait_stream(side)
    return a + b + c


@program("a function that is called from two contexts runs on the stream of each")
def helper_called_on_two_streams(first, second, sleep, /, x):
    def helper(x):
        return sleep(x) * 2 + 1

    fork(first, second)
    with torch.cuda.stream(first):
        a = helper(x)
    with torch.cuda.stream(second):
        b = helper(x)
    join(first, second)
    return a - b * 3


# ---- what is current


@program("current_stream(device), default_stream() and comparisons between them")
def current_and_default_stream(side, sleep, /, x):
    current = torch.cuda.current_stream(x.device)
    default = torch.cuda.default_stream()
    x = sleep(x + 1)
    default.wait_stream(current)
    side.wait_stream(default)
    with torch.cuda.stream(side):
        inside = torch.cuda.current_stream()
        a = sleep(x) * (2 if inside == side else 100)
    torch.cuda.current_stream("cuda").wait_stream(side)
    return a + (1 if torch.cuda.current_stream(0) != side else 100)


@program("set_stream is carried out while tracing and then ignored (#109848)")
def set_stream_back_and_forth(side, sleep, /, x):
    current = torch.cuda.current_stream()
    x = sleep(x + 1)
    side.wait_stream(current)
    torch.cuda.set_stream(side)
    a = _branch(sleep(x))
    torch.cuda.set_stream(current)
    current.wait_stream(side)
    return a + x


@program("the accelerator's duplicates of current_stream, set_stream and synchronize", host_reads=True)
def accelerator_functions(side, sleep, /, x):
    current = torch.accelerator.current_stream()
    x = sleep(x + 1)
    side.wait_stream(current)
    torch.accelerator.set_stream(side)
    a = sleep(x) * 2
    torch.accelerator.set_stream(current)
    torch.accelerator.synchronize()
    return a + x


# ---- events and streams as values


@program("record_event with and without an argument, record and wait on a stream that is not current")
def record_on_another_stream(first, second, outside: torch.cuda.Event, sleep, /, x):
    current = torch.cuda.current_stream()
    ready = current.record_event()
    first.wait_event(ready)
    with torch.cuda.stream(first):
        a = sleep(x) * 2
    outside.record(first)
    outside.wait(second)
    with torch.cuda.stream(second):
        b = sleep(a) + 1
    done = second.record_event(torch.cuda.Event())
    done.wait(current)
    return a + b


@program("one event recorded many times: a wait is for the last record before it")
def event_recorded_again(side, event: torch.cuda.Event, sleep, /, x):
    current = torch.cuda.current_stream()
    for _ in range(3):
        x = sleep(x) + 1
        event.record()
        with torch.cuda.stream(side):
            event.wait()
            x = sleep(x) * 2
            event.record()
        event.wait()
    return x + current.device_index


@program("streams compared, hashed, and asked for their device and priority")
def stream_attributes(k: Kit) -> Any:
    first, second, sleep = k.stream(), k.stream(priority=-1), k.sleep
    factors = {first: 3, second: 5}

    def fn(x):
        fork(first, second)
        with torch.cuda.stream(first):
            a = sleep(x) * factors[first]
        with torch.cuda.stream(second):
            b = sleep(x) * (factors[second] - second.priority)
        join(first, second)
        if first == second or first.device != x.device or hash(first) == hash(second):
            return a
        return a - b

    return fn


@program("a stream with a priority, made inside, keeps it")
def priority_stream_made_inside(sleep, /, x):
    side = torch.cuda.Stream(priority=-1)
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
    join(side)
    return a + x + side.priority


@program("a stream of another library, wrapped outside and inside")
def external_stream(k: Kit) -> Any:
    owner, sleep = k.stream(), k.sleep
    handle = owner.cuda_stream
    outside = torch.cuda.ExternalStream(handle)

    def fn(x):
        fork(outside)
        with torch.cuda.stream(outside):
            a = sleep(x) * 2
        inside = torch.cuda.ExternalStream(handle)
        with torch.cuda.stream(inside):
            b = a + 1
        join(inside)
        return a * b

    return fn


@program("the raw handle handed to a custom operator is another number: it crashes there (#173172, #180179)")
def raw_handle_to_operator(side, sleep, /, x):
    current = torch.cuda.current_stream()
    x = sleep(x + 1)
    a = torch.ops.overlay_test.double_on(x, current.cuda_stream)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        b = torch.ops.overlay_test.double_on(sleep(x), torch.cuda.current_stream().cuda_stream)
        c = torch.ops.overlay_test.double_on(b, side.cuda_stream)
    current.wait_stream(side)
    return a + b + c


# ---- graph breaks


@program("after a graph break inside a context the rest runs on the default stream", fullgraph=False)
def graph_break_in_context(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    def fn(x):
        current = torch.cuda.current_stream()
        x = sleep(x + 1)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = sleep(x) * 2
            torch._dynamo.graph_break()
            b = sleep(a) + 3
        current.wait_stream(side)
        return a * b

    return fn


@program("a stream in a local variable becomes a context at a graph break (#187472, #183504)", fullgraph=False)
def locals_across_graph_break(k: Kit) -> Any:
    sleep = k.sleep

    def fn(x):
        side, done = torch.cuda.Stream(), torch.cuda.Event()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = sleep(x) * 2
            done.record()
        torch._dynamo.graph_break()
        current.wait_event(done)
        b = a + 1
        a.record_stream(current)
        return b

    return fn


@program("a graph break inside nested contexts, in a function that is called there", fullgraph=False)
def graph_break_in_nested_call(k: Kit) -> Any:
    outer, inner, sleep = k.stream(), k.stream(), k.sleep

    def helper(x):
        x = sleep(x) + 1
        torch._dynamo.graph_break()
        return sleep(x) * 2

    def fn(x):
        current = torch.cuda.current_stream()
        outer.wait_stream(current)
        with torch.cuda.stream(outer):
            inner.wait_stream(outer)
            with torch.cuda.stream(inner):
                a = helper(x)
            outer.wait_stream(inner)
            b = a * 3
        current.wait_stream(outer)
        return b + x

    return fn


@program("a branch on a tensor inside a context reads it on the stream outside, where nobody waits", fullgraph=False)
def branch_on_a_tensor_in_context(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    def fn(x):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = sleep(x) * 2
            if (a > -1000).all():
                a = sleep(a) + 1
            if (a > 1000).any():
                a = a * 0
        current.wait_stream(side)
        return a * x

    return fn


@program("`and`, `or` and a loop on tensors inside a context", fullgraph=False)
def tests_of_tensors_in_context(k: Kit) -> Any:
    outer, inner, sleep = k.stream(), k.stream(), k.sleep

    def fn(x):
        current = torch.cuda.current_stream()
        outer.wait_stream(current)
        with torch.cuda.stream(outer):
            a = sleep(x).clamp(0, 1)
            inner.wait_stream(outer)
            with torch.cuda.stream(inner):
                b = (sleep(a) > -1).all() and (a > 1000).any()
                c = (sleep(a) > 1000).any() or (a > -1).all()
            outer.wait_stream(inner)
            while (sleep(a) < 3).any():
                a = a + 1
        current.wait_stream(outer)
        return a + b * 2 + c * 4

    return fn


@program(
    "a generator of tensors, made inside a context, crosses a graph break as what is computed outside", fullgraph=False
)
def generator_across_graph_break(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    def fn(x):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = sleep(x) * 2
            found = all((sleep(a) > limit).any() for limit in (-1000, 1000))
            b = a + found
        current.wait_stream(side)
        return b * x

    return fn
