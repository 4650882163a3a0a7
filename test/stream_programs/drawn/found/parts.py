"""Programs of one frame that read and write views and parts of tensors."""

from stream_programs.drawn.found import found
from stream_programs.drawn.kit import current, torch


@found
def concatenation_whose_memory_is_taken_behind_a_record(s1, e2, sleep, /, x, y):
    v1 = sleep(y) * 3
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        e2.record(current)
        v2 = torch.zeros_like(x)
        v1.zero_()
        v3 = x.t()
        with torch.cuda.stream(current):
            done1 = s1.record_event()
            done1.wait()
            v4 = torch.cat([v1, v3])[16:48]
    return v2, v4


@found
def copy_of_an_input_that_is_updated_in_part_and_read_behind_what_another_stream_waits_for(s1, /, x, state):
    v1 = x * 3
    state[4:20].copy_(x[8:24])
    v1.copy_(state)
    s1.wait_stream(current)
    v2 = v1.sum(0, keepdim=True)
    return (v2,)


@found
def diagonal_of_what_another_stream_updates_beside_it(s2, s3, /, x, y):
    v1 = x * 2
    s3.wait_stream(current)
    with torch.cuda.stream(s3):
        v2 = y * 2
    s2.wait_stream(current)
    s2.wait_stream(s3)
    with torch.cuda.stream(s2):
        v1[4][::2] = v2[5][1::2]
        v3 = v1.diagonal(1)  # unjoined
    return v2, v3


@found
def event_that_a_stream_awaits_without_launching_orders_the_read_of_a_view(s1, s2, e1, /, z):
    v1 = z.real - z.imag
    e1.record(current)
    s1.wait_event(e1)
    s2.wait_event(e1)
    with torch.cuda.stream(s1):
        v2 = v1 * 2
    current.wait_stream(s1)
    return (v2,)


@found
def part_of_a_concatenation_that_is_read_under_a_condition(s1, buffer, sleep, /, x, state):
    v1 = buffer - x
    v2 = sleep(x) + state
    v3 = torch.cat([v2, v1 * 2])[16:48]
    with torch.cuda.stream(s1):
        v4 = buffer.view(32, 32)
    x[4:20].copy_(v2[8:24])
    x.clamp_(-2, 2)
    return v3, v4


@found
def part_of_an_input_of_which_another_is_written(s1, buffer, /, x, ready):
    v1 = buffer + buffer
    with torch.cuda.stream(s1):
        ready.wait()
        x[4:20].copy_(buffer[8:24])
        v2 = x[3:4]
    current.wait_stream(s1)
    return v1, v2


@found
def record_stream_of_the_base_of_a_slice(s1, /, state):
    # unjoined
    v1 = state.t() * 2
    v2 = v1[:, ::2]
    v1.record_stream(s1)
    return (v2,)


@found
def recorded_tensor_that_is_an_input_with_other_rows(s1, /, x, y):
    v1 = torch.slice_scatter(x, y[:2], 0, 2, 4)
    v1.record_stream(s1)
    return (v1,)


@found
def returned_view_becomes_memory_of_its_own_and_its_base_is_freed(s1, e1, buffer, /, y, state):
    v1 = state + buffer
    v2 = state.t().contiguous()
    with torch.cuda.stream(s1):
        v3 = y.t()
        e1.record(current)
        s1.wait_event(e1)
        v4 = v3 + v2
        v5 = v2[1:]
    v6 = v1.clamp(-2, 2) + 1
    return v3, v4, v5, v6  # unjoined


@found
def returned_view_behind_the_write_back_of_an_input(s3, e2, buffer, /, x, state):
    v3 = state + x
    v3.zero_()
    v4 = v3[8:24]
    buffer.mul_(2)
    buffer.clamp_(-2, 2)
    with torch.cuda.stream(s3):
        s3.wait_stream(current)
        v7 = v3 + 1
    e2.record(s3)
    e2.wait()
    return v4, v7


@found
def rows_that_an_update_left_alone_read_by_a_stream_that_waited_before(s1, buffer, /, y, ready):
    y[4:20].copy_(buffer[8:24])
    v1 = y[3:4]
    s1.wait_event(ready)
    return (v1,)


@found
def slice_of_another_streams_memory_updated(s1, s2, /, x, y):
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1 = x + y
    s2.wait_stream(s1)
    with torch.cuda.stream(s2):
        v1[4:20].copy_(y[8:24])
    current.wait_stream(s1)
    current.wait_stream(s2)
    return (v1,)


@found
def slices_of_a_returned_concatenation_on_two_streams(s1, s2, buffer, /, y, state):
    s2.wait_stream(current)
    with torch.cuda.stream(s2):
        v1 = y * 2
    s1.wait_stream(current)
    s1.wait_stream(s2)
    with torch.cuda.stream(s1):
        v2 = torch.cat([v1, buffer])[16:48]
        v3 = (state.cumsum(0)).clamp(-2, 2)
    current.wait_stream(s1)
    return v2, v3


@found
def update_of_a_slice_whose_sum_reads_what_it_replaced(s1, s2, buffer, /, y, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = state + y
        done1 = s1.record_event()
    done1.wait()
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v1[:, ::2].add_(buffer[:, ::2])
        s1.wait_stream(current)
        v2 = (v1.sum(1, keepdim=True)).clamp(-2, 2)
        v3 = v1.t()
    current.wait_stream(s2)
    return v2, v3


@found
def view_of_a_constant_that_was_computed(s1, buffer, /, y, state, ready, n):
    v1 = buffer.t().contiguous()
    v2 = v1.relu()
    with torch.cuda.stream(s1):
        v3 = v2.t()
        v4 = v3.t()
        ready.wait()
        v5 = state + 1 if n > 0 else state * 2
        v6 = y + buffer
        done1 = current.record_event()
        done1.wait()
        v3.zero_()
    current.wait_stream(s1)
    return v4, v5, v6


# View of memory of the caller's stream given as out: the view is a side stream's, the memory isn't.
@found
def view_of_memory_of_another_stream_given_as_out(s1, /, x):
    v1 = torch.empty(32, 32, device="cuda")
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        torch.mul(x.view(-1), 3, out=v1.view(-1))
    current.wait_stream(s1)
    return (v1,)


@found
def view_that_is_an_operator_call_launches_nothing(s1, /, x, y):
    v1 = torch.complex(x, y)
    v2 = x @ y
    v3 = torch.view_as_real(v1)[..., 0]
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v4 = v2 @ v2
    current.wait_stream(s1)
    return v3, v4


@found(loads="[0, 1]")
def imaginary_parts_of_an_input_of_which_the_real_ones_are_updated(s1, /, state, z):
    current.wait_stream(s1)
    z.real.add_(state)
    v1 = z.imag
    v2 = state * 2
    with torch.cuda.stream(s1):
        v3 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    return v1, v2, v3


@found(loads="[0, 1]")
def imaginary_parts_of_an_input_of_which_the_real_ones_get_zeros_added(s1, /, state, z):
    current.wait_stream(s1)
    z.real.add_(torch.zeros_like(state))
    v1 = z.imag
    v2 = state * 2
    with torch.cuda.stream(s1):
        v3 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    return v1, v2, v3


@found(train="0")
def input_to_whose_part_nothing_is_added_in_training(s1, s2, /, x, z, state, ready):
    s2.wait_event(ready)
    state.zero_()
    with torch.cuda.stream(s1):
        done1 = s2.record_event()
        done1.synchronize()
        v1 = x + 1
        z.real.add_(state)
        v2 = z.imag
    return v1, v2


@found(loads="[0, 1]")
def row_of_an_input_of_which_another_is_updated_in_another_shape(s1, /, x, state):
    current.wait_stream(s1)
    x.view(16, 64)[1].add_(state.view(16, 64)[2])
    v1 = x[8]
    v2 = state * 2
    with torch.cuda.stream(s1):
        v3 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    return v1, v2, v3
