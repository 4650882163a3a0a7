"""Other programs of one frame."""

from stream_programs.drawn.found import found
from stream_programs.drawn.kit import add_to, calls, current, F, torch


@found
def clone_that_a_pass_drops_is_read_late(s1, buffer, /, x):
    v1 = buffer.clone()
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v2 = x * 2
    v3 = x @ v1.sign()
    current.wait_stream(s1)
    return v2, v3


@found
def constant_that_the_host_writes_beside_a_copy_in_a_frame_without_streams(s1, s4, buffer, /, x, y, state, out, n):
    v1 = buffer.zero_()
    out.copy_(y, non_blocking=True)
    v2 = x + y
    torch._foreach_copy_([out[2:4], out[8:20]], [buffer[6:8], buffer[12:24]], non_blocking=True)
    with torch.cuda.stream(s1):
        v3 = v2[:, 5:6]
        done1 = s4.record_event()
    buffer[1:9] = 3
    buffer.clamp_(-2, 2)
    return v3, v2 * 2


@found
def copied_memory_is_downloaded_on_another_stream(s1, buffer, /, x, state, out, ready):
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        v1 = buffer + state
        state.copy_(buffer)
    done1 = s1.record_event()
    done1.wait()
    v2 = state + x
    out.copy_(state, non_blocking=True)
    return v1, v2


@found
def copies_of_one_value_on_two_streams(s1, /, x):
    v1 = x @ x
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v2 = v1.t().clone()  # unjoined
    v3 = v1.clone()
    return v2, v3


@found
def copy_to_the_host_of_what_is_written_later(s1, /, state, out):
    out.copy_(state, non_blocking=True)
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        state[1:9] = 3
    current.wait_stream(s1)
    return (state * 2,)


@found
def host_memory_that_a_constant_overwrites_before_anybody_reads_it(s1, /, x, y, out):
    v1 = torch.ones(32, 32, device="cuda")
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        out.copy_(y, non_blocking=True)
        v2 = x * 2
        out[3].copy_(v2[5], non_blocking=True)
        done1 = torch.cuda.Event()
        done1.record(s1)
        out.copy_(v1, non_blocking=True)
    current.wait_event(done1)
    y.add_(1)
    current.wait_stream(s1)
    return (v2,)


@found
def host_memory_that_is_filled_and_uploaded_and_filled_again(s1, /, x, y, out):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        out.copy_(x, non_blocking=True)
        y.copy_(out, non_blocking=True)
        v1 = y * 2
        out.copy_(v1, non_blocking=True)
        y.copy_(out, non_blocking=True)
    current.wait_stream(s1)
    return (v1,)


# Operator that realizes its arguments for itself reads what a side stream computes for an input.
@found
def index_put_of_what_a_side_stream_computes_for_an_input(s1, /, y, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        y.clamp_(-2, 2)
    current.wait_stream(s1)
    state[3].index_put_((torch.arange(4, device="cuda") * 2,), y[6, :4])
    return ()


@found
def input_that_is_updated_before_an_event_and_recorded_on_a_stream_behind_it(s1, e1, /, x, state):
    state.copy_(x)
    e1.record(current)
    state.record_stream(s1)
    v1 = x + 1
    return (v1,)


@found
def input_that_is_updated_behind_a_mask(s1, buffer, /, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        buffer[buffer > 0] = 1
    current.wait_stream(s1)
    v1 = buffer + state
    return (v1,)


@found
def list_of_recorded_tensors_that_is_interpolated_from_its_other_end(s1, /, x, y):
    v1 = x + 1
    v2 = y * 2
    v1.record_stream(s1)
    torch._foreach_lerp_([v2, v1], [y, x], 0.7)
    v2.record_stream(s1)
    return v1, v2


@found
def list_of_tensors_that_another_stream_updates(s1, /, x, y):
    v1 = x * 2
    v2 = y * 3
    v3 = v2.view(64, 16)
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        torch._foreach_add_([v1, v3], 1)
    current.wait_stream(s1)
    return v1, v3


@found
def memory_handed_on_behind_the_callers_event(s1, /, ready):
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        v1 = torch.ones(32, 32, device="cuda")
    done1 = s1.record_event()
    done1.wait()
    return (v1,)


@found
def memory_of_another_stream_given_as_out(s1, s2, buffer, /, y, state):
    v1 = state + y
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v2 = buffer.cumsum(0)
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            s1.wait_stream(s2)
            torch.add(v2, v1, out=v2)
    current.wait_stream(s1)
    return v1, v2


# Memory of the caller's stream given as out for two results: the caller may drop them as soon as it has read them.
@found
def memory_of_another_stream_given_as_out_for_two_results(s1, /, x):
    v1 = torch.empty(32, device="cuda")
    v2 = torch.empty(32, dtype=torch.int64, device="cuda")
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        torch.max(x, 1, out=(v1, v2))
    current.wait_stream(s1)
    return v1, v2


@found
def memory_that_lives_on_is_set_beside_its_reader(s1, /, x, y):
    v1 = x + 1
    s1.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s1):
        v2 = v1 * y
        v1[:] = 0
        v3 = v1.view(16, 64)
    return v2, v3  # unjoined


@found
def new_value_of_an_input_that_goes_to_the_host_too(s1, buffer, /, x, y, out):
    buffer.clamp_(-2, 2)
    y[2:4].copy_(out[6:8], non_blocking=True)
    out.copy_(buffer, non_blocking=True)
    v1 = buffer + y
    buffer.record_stream(s1)
    return (v1,)


@found
def no_op_of_what_is_written_back(s1, buffer, /, state):
    state[4:20].copy_(buffer[8:24])
    v1 = torch.zeros_like(buffer)
    v2 = v1 + buffer
    v3 = v2 + state
    with torch.cuda.stream(s1):
        done1 = torch.cuda.Event()
        done1.record(current)
        s1.wait_event(done1)
        v4 = v1 + state
    current.wait_stream(s1)
    return v1, v2, v3, v4


@found(loads="[0, 1]")
def noise_of_the_layout_of_an_input_that_nobody_has_waited_for(s1, /, y, state):
    y.record_stream(torch.cuda.current_stream())
    v1 = torch.randn_like(state)
    return (v1,)


@found
def out_of_the_callers_memory_outside_of_a_stream_block(s1, buffer, /, x, y):
    torch.add(x, buffer, out=x)
    x.clamp_(-2, 2)
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = x + y
    return (v1,)  # unjoined


@found
def product_is_fused_with_what_stands_behind_a_record(e2, w0, buffer, sleep, /, n):
    v1 = sleep(buffer) @ w0
    v2 = torch.ones(32, 32, device="cuda")
    e2.record()
    v3 = v2 + v1 if n > 0 else v2 + v1
    v4 = v3 + v2
    v5 = v4 + v3
    return v2, v3, v4, v5


@found
def promise_by_which_another_stream_comes_behind_a_reader_of_its_memory(s2, s4, s5, /, x, y, state, ready):
    with torch.cuda.stream(s4):
        s4.wait_event(ready)
        v3 = x - y
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            s2.wait_stream(s4)
            v4 = v3.relu()
        v5 = y.clamp(-1, 1) @ state.sign()
    v4.record_stream(s5)
    current.wait_stream(s2)
    current.wait_stream(s4)
    return v5


@found
def read_on_another_stream_realized_for_an_operator_that_is_known(s1, s2, buffer, /, x, state):
    with torch.cuda.stream(s1):
        done1 = torch.cuda.Event()
        done1.record(current)
        s1.wait_event(done1)
        state[4:20].copy_(x[8:24])
    v1 = buffer + x
    with torch.cuda.stream(s1):
        done2 = torch.cuda.Event()
        done2.record(current)
        s1.wait_event(done2)
        v2 = v1.clone()
        s1.wait_stream(s2)
        add_to(state, v2)
        state.clamp_(-2, 2)
    current.wait_stream(s1)
    return (v2,)


@found
def record_in_a_frame_that_computes_nothing(s1, /, x):
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        done1 = torch.cuda.Event()
        done1.record()
    return (x,)


@found
def record_stream_before_the_last_update(s1, s2, /, x, y):
    v1 = x + y
    v2 = v1[1:]
    v2.record_stream(s1)
    s2.wait_stream(current)
    with torch.cuda.stream(s2):
        v1.mul_(2)
        v3 = x * y
        v3.add_(1)
        v3.record_stream(s1)
        v3.mul_(2)
    current.wait_stream(s2)
    return v1, v2, v3


@found
def record_stream_of_a_copy_ahead_of_a_record(s1, e1, /, x):
    v1 = x.clone()
    e1.record(current)
    v2 = v1.clone()
    e1.record(current)
    v1.record_stream(s1)
    return (v2,)


@found
def record_stream_of_a_copy_that_another_stream_reads(s1, s2, s3, /, state):
    v1 = state.view(32, 32)
    v1[1:9] = 3
    v2 = v1.sum()
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v3 = v1.clone()
        state.mul_(2)
        state.clamp_(-2, 2)
        with torch.cuda.stream(s3):
            v3.record_stream(s2)
    current.wait_stream(s1)
    return v1, v2, v3


@found
def record_stream_of_a_copy_to_the_type_that_there_is(s1, /, x):
    v1 = x.to(torch.float32, copy=True)
    v1.record_stream(s1)
    return (v1,)


@found
def record_stream_of_an_input_that_was_updated(s1, buffer, /, x):
    x[0].add_(1)
    x.clamp_(-2, 2)
    v1 = buffer.detach().amax(1, keepdim=True)
    x[1].record_stream(s1)
    v2 = v1 + buffer
    v3 = x + buffer
    v4 = x.view(32, 32)
    return v1, v2, v3, v4


@found
def record_stream_of_what_is_converted_there_and_back(s1, /, x):
    v1 = x.double().float()
    v1.record_stream(s1)
    return (v1,)


@found
def record_stream_where_no_block_has_a_stream(s1, /, x, y):
    v1 = x + y
    v1.record_stream(s1)
    v1.mul_(2)
    return v1, v1[1:]


@found
def result_that_adds_nothing_on_two_streams(s1, s2, buffer, /):
    current = torch.cuda.current_stream()
    v1 = torch.zeros_like(buffer)
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v2 = v1 + buffer
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            s1.wait_stream(s2)
            v2.add_(v1)
    current.wait_stream(s1)
    return v1, v2


@found
def result_that_was_written_over_and_its_source_is_read_later(s1, w0, buffer, sleep, /, x, state):
    v1 = torch.ones(32, 32, device="cuda")
    v2 = sleep(buffer) @ w0
    v1.copy_(v2)
    done1 = current.record_event()
    v3 = state - v2
    with torch.cuda.stream(s1):
        done1.wait()
        v4 = x.clone()
    done2 = s1.record_event()
    done2.wait()
    return v1, v3, v4


@found
def result_updated_in_place_and_left_unjoined(s1, buffer, /, state, y):
    v1 = y + state
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1.relu_()
    return (v1,)  # unjoined


# Results of a nested region that updates on its own stream: the caller may drop them as soon as it has read them.
@found
def results_of_a_nested_region_that_updates_on_its_own_stream(k):
    s1 = k.stream()

    @torch.compiler.nested_compile_region
    def block(x, y):
        current = torch.cuda.current_stream()
        v1 = x * 2
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1.add_(y)
        current.wait_stream(s1)
        return v1

    def fn(x, y):
        return block(x, y), block(y, x)

    return calls(k, fn)


@found
def returned_input_that_another_stream_reads(s1, s2, /, x, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        state.relu_()
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        s2.wait_stream(s1)
        v1 = state + x
        done1 = torch.cuda.Event()
        done1.record(s1)
        v2 = v1.sum(0, keepdim=True)
        v3 = state.view(32, 32)
    done1.wait()
    current.wait_stream(s2)
    return v2, v3


# Scans in several blocks on two streams: the blocks of each hand their sums on in a workspace.
@found
def scans_in_several_blocks_on_two_streams(s1, /, x, y):
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1 = x.repeat(64, 1).flatten().cumsum(0)
    v2 = y.repeat(64, 1).flatten().cumsum(0)
    current.wait_stream(s1)
    return v1, v2


@found
def scatter_that_a_pass_makes_anew(s1, buffer, /, y):
    v1 = y * 2
    v2 = v1 + buffer
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1[4:20].copy_(v2[8:24])
    current.wait_stream(s1)
    return v1, v2


@found
def tensor_that_is_read_before_it_is_given_as_out(s1, sleep, /, x):
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1 = torch.full((32, 32), 1.0, device="cuda")
    v2 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    v3 = sleep(v1) * 3
    torch.add(v1, v2, out=v1)
    return v1, v2, v3


@found
def tensor_that_is_recorded_after_a_list_with_an_input_in_it_is_updated(s1, /, x, y):
    v1 = x + 1
    torch._foreach_mul_([v1, y], [x, x])
    v1.record_stream(s1)
    return (v1,)


@found
def update_behind_a_mask_of_a_result_of_a_list(s1, buffer, /, x, y):
    with torch.cuda.stream(s1):
        done1 = current.record_event()
        done1.wait()
        v1 = torch._foreach_mul([buffer, y], 2)[1]
    v2 = x * 2
    current.wait_stream(s1)
    v1.masked_fill_(v1 > 0, 1)
    return v1, v2


# Updates in place that no name tells: the results were taken for memory of the stream that updates.
@found
def updates_in_place_that_no_name_tells(s1, /, x, y):
    v1, v2, v3, v4 = x * 2, x * 3, x * 4, x * 5
    v5 = v4.contiguous()  # the same tensor
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        F.relu(v1, inplace=True)
        torch.ops.aten.add_.Tensor(v2, y)
        v3.__iadd__(y)
        torch.ops.aten.add_.Tensor(v4, v5)
    current.wait_stream(s1)
    return v1, v2, v3, v4


@found
def waits_that_stay_are_made_once(s1, /, x):
    s1.wait_stream(torch.cuda.current_stream())
    return (x,)


@found
def what_an_operator_wrote_is_read_on_another_stream(s1, buffer, /, x, state):
    add_to(x, buffer)
    x.clamp_(-2, 2)
    with torch.cuda.stream(s1):
        done1 = current.record_event()
        done1.wait()
        v1 = x + state
    return (v1,)  # unjoined


@found
def zeroed_on_a_side_stream_then_added_to(s1, buffer, /, x, state, ready):
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        buffer.zero_()
    current.wait_stream(s1)
    buffer[:, ::2].add_(state[:, ::2])
    return (x,)
