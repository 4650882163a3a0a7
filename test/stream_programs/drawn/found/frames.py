"""Programs without a backward that a graph break cuts into frames."""

from stream_programs.drawn.found import found
from stream_programs.drawn.kit import current, F, scaled_into, torch


@found
def columns_that_an_update_left_alone_awaited_by_an_event_of_an_earlier_frame(s1, s2, sleep, /, state, n):
    v1 = state + 1 if n > 3 else state * 2
    v2 = sleep(state) * 3
    with torch.cuda.stream(s1):
        done = torch.cuda.Event()
        done.record(current)
        s1.wait_event(done)
        v2.relu_()
        v3 = v1[:, 5:6]
        v1[:, ::2].add_(state[:, ::2])
        torch._dynamo.graph_break()
        with torch.cuda.stream(s1):
            v2.add_(v1)
        s2.wait_event(done)
    current.wait_stream(s1)
    return v1, v2, v3


@found
def concatenation_of_inputs_on_a_side_stream(s1, buffer, /, x, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        buffer.add_(state)
        buffer.clamp_(-2, 2)
        torch._dynamo.graph_break()
        v1 = torch.cat([x, buffer])[16:48]
        x.add_(buffer)
        x.clamp_(-2, 2)
    current.wait_stream(s1)
    return (v1,)


@found
def copy_of_an_input_that_an_update_of_a_list_changes(s1, /, x):
    torch._foreach_mul_([x], 2)
    v1 = x.clone()
    s1.wait_stream(torch.cuda.current_stream())
    torch._dynamo.graph_break()
    v2 = x + 1
    return v1, v2


@found
def dropped_while_a_stream_that_nobody_joins_reads_it(s1, /, x, y):
    """Eager hands on the memory of v1 as early."""
    v1 = x + 1
    v2 = y * 2
    torch._dynamo.graph_break()
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v2.add_(v1)
    return (x.view(16, 64),)  # unjoined


@found
def foreach_on_a_side_stream(s1, /, x, y):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        y.mul_(2)
        torch._dynamo.graph_break()
        v1, v2 = torch._foreach_add([x, y], 1)
    current.wait_stream(s1)
    return v1, v2


@found
def frame_of_views_that_only_waits(s1, /, state, ready):
    s1.wait_event(ready)
    v1 = state[1:]
    torch._dynamo.graph_break()
    with torch.cuda.stream(s1):
        v2 = state + 1
    torch.cuda.current_stream().wait_stream(s1)
    return v1, v2


@found
def frame_that_only_waits_and_computes_nothing_that_is_read(s1, /, state, ready):
    with torch.cuda.stream(s1):
        ready.wait()
        v1 = state.amax(1, keepdim=True)
        torch._dynamo.graph_break()
        v2 = state + 1
    torch.cuda.current_stream().wait_stream(s1)
    return (v2,)


@found
def memory_of_a_local_variable_behind_a_graph_break(s1, e1, buffer, /, x, y, state, ready, n):
    v1 = y + state
    v2 = buffer.sum(0, keepdim=True)
    with torch.cuda.stream(s1):
        ready.wait()
        v3 = buffer + 1
        e1.record(current)
        s1.wait_event(e1)
        v4 = (v3 + v2).clamp(-2, 2)
        v5 = buffer.detach().clone()
        for _ in range(n):
            v5 = v5.clamp(-2, 2) + 1
        torch._dynamo.graph_break()
    v6 = x.clone()
    current.wait_stream(s1)
    return v3, v4, v5, v6


@found
def memory_that_a_side_stream_fills_for_a_later_frame(s1, s2, buffer, /, x):
    v1 = torch.empty(32, 32, device="cuda")
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        scaled_into(v1, buffer.contiguous(), 2)
    current.wait_stream(s2)
    scaled_into(v1, v1, 2)
    v2 = x * 2
    with torch.cuda.stream(s1):
        torch._dynamo.graph_break()
        s1.wait_stream(current)
        v3 = torch.where(v1 > 0, v1, x)  # unjoined
    return v2, v3


@found
def part_of_a_concatenation_that_a_later_frame_reads_on_another_stream(s2, s4, e1, /, x, y):
    # unjoined
    y.clamp_(-2, 2)
    with torch.cuda.stream(s4):
        s4.wait_stream(current)
        v1 = torch.cat([y, x])[16:48]
        with torch.cuda.stream(s2):
            torch._dynamo.graph_break()
            e1.record(current)
            s2.wait_event(e1)
            e1.record(s4)
            s2.wait_event(e1)
            v2 = v1.clamp(-1, 1) @ x.sign()
            s4.wait_event(e1)
    return (v2,)


@found
def part_of_an_input_that_is_updated_while_others_read_the_rest(s1, s2, /, x):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = x * 2
        v2 = v1[3:4]
        with torch.cuda.stream(s2):
            torch._dynamo.graph_break()
            s2.wait_stream(s1)
            v1[0, 0].sub_(x[1, 1]).mul_(2)
    current.wait_stream(s2)
    return (v2,)


@found
def update_on_another_stream_lives_on_behind_a_break(s1, s2, e1, /, x, y, state, ready):
    with torch.cuda.stream(s2):
        s2.wait_event(ready)
        v1 = y.clamp(-1, 1) * x
    e1.record(s2)
    current.wait_event(e1)
    v1[1:9] = 3
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        v2 = state.clamp(-1, 1) * y
        v3 = v2 * 2
        torch._dynamo.graph_break()
        done1 = torch.cuda.Event()
        done1.record(current)
        s1.wait_event(done1)
        v4 = v1 - x
        v5 = torch.zeros_like(y)
    return v2, v3, v4, v5  # unjoined


# View by a call (`view_as_real`) that another stream reads when its frame ends at a graph break: freed too early.
@found
def view_by_a_call_that_is_read_after_its_frame(s1, buffer, /, x, y):
    v1 = torch.view_as_real(torch.complex(y, buffer))[..., 0]
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v2 = F.conv2d(v1.view(1, 1, 32, 32), torch.ones(1, 1, 3, 3, device="cuda"), padding=1).view(32, 32)
    torch._dynamo.graph_break()
    v3 = x @ y
    current.wait_stream(s1)
    return v2, v3


# A result is a view of what a concatenation is made of; a later frame updates the concatenation.
@found
def view_of_what_a_concatenation_is_made_of_is_a_result(s1, buffer, /, x):
    v1 = torch.empty(32, 32, device="cuda")
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        torch.mul(x, 2, out=v1)
    current.wait_stream(s1)
    v2 = torch.cat([v1, buffer])[16:48]
    v3 = v1.reshape(64, 16)
    torch._dynamo.graph_break()
    v2[4:20].copy_(buffer[8:24])
    return v2, v3
