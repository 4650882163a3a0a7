"""Programs without a backward that copy between host and device."""

from stream_programs.drawn.found import found
from stream_programs.drawn.kit import add_to, current, F, scaled_into, torch


@found
def blocking_copy_ahead_of_a_partition_on_its_stream(s1, s3, w0, sleep, /, x, y, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = x * 3
        with torch.cuda.stream(s3):
            s3.wait_stream(s1)
            v2 = state.clone()
            torch._dynamo.graph_break()
            v3 = sleep(v1) @ w0
            v4 = v2.cpu()
    return v3, v4


# Copies into a clone of what a user's kernel fills: the clone is dropped, and its memory was made anew, unfilled.
@found
def copies_into_a_clone_of_what_a_users_kernel_fills(s1, /, x, pinned):
    v1 = torch.empty(32, 32, device="cuda")
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        scaled_into(v1, x.contiguous(), 2)
    current.wait_stream(s1)
    v2 = v1.clone()
    torch._foreach_copy_([v2[2:4], v2[8:20]], [pinned[6:8], pinned[12:24]], non_blocking=True)
    return v1, v2


@found
def copy_of_an_input_ahead_of_a_copy_that_blocks(s2, s3, buffer, /, y, state, pinned):
    v1 = y * 2
    done1 = torch.cuda.Event()
    done1.record(s2)
    torch._dynamo.graph_break()
    s3.wait_stream(current)
    v2 = state.clone()
    v3 = pinned.to("cuda")
    v4 = buffer.clamp(-1, 1) @ v2.sign()
    return v1, v3, v4


# Copy of an input that an asynchronous copy fills: it takes no computing, and the caller got the input instead.
@found
def copy_of_an_input_that_an_asynchronous_copy_fills(s1, /, x, pinned, ready):
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        x.copy_(pinned, non_blocking=True)
        v1 = x.double().float()
    done1 = torch.cuda.Event()
    done1.record(s1)
    current.wait_event(done1)
    return (v1,)


@found
def copy_that_another_stream_reads_instead_of_the_result(s2, s3, sleep, /, x, state, pinned, ready):
    v3 = x * 2
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v4 = sleep(state) + v3
        v5 = pinned.to("cuda")
        v6 = v5.clone()
        with torch.cuda.stream(s3):
            s3.wait_stream(s2)
            v7 = sleep(v6).relu()
    current.wait_stream(s2)
    current.wait_stream(s3)
    return v4, v5, v7


@found
def copy_that_blocks_and_nobody_reads_at_the_end_behind_a_graph_break(s1, s2, /, x, y):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = x * 2
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v2 = y + 1
    current.wait_stream(s2)
    torch._dynamo.graph_break()
    with torch.cuda.stream(s1):
        v3 = v1 * 3
        v1.cpu()
    return v2, v3


@found
def copy_that_blocks_the_host_behind_work_of_another_stream(s1, s2, buffer, /, state, pinned, n):
    v1 = buffer + buffer if n > 0 else buffer + buffer
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v2 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            torch._dynamo.graph_break()
            v3 = v2 + state
    current.wait_stream(s1)
    return v1, v2, v3


# Copy that blocks the host, outside of a graph, comes after a copy of another stream for which its stream waited.
@found
def copy_that_blocks_the_host_between_graphs_after_another_copy(s1, s3, buffer, /, pinned, out, ready):
    s3.wait_event(ready)
    torch._dynamo.graph_break()
    out.copy_(buffer, non_blocking=True)
    with torch.cuda.stream(s1):
        done1 = torch.cuda.Event()
        done1.record(current)
        s1.wait_event(done1)
        v1 = pinned.to("cuda")
    return (v1,)


@found
def copy_that_blocks_the_host_orders_a_stream_that_is_only_recorded(s4, buffer, /, state):
    state.add_(buffer)
    state.clamp_(-2, 2)
    v1 = buffer.cpu()
    buffer.record_stream(s4)
    return (v1,)


# Copy to the host of what a user's kernel fills: memory made from nothing was taken for a constant, so it blocked.
@found
def copy_to_the_host_of_what_a_users_kernel_fills(s1, s2, /, x, state):
    v1 = torch.empty(32, 32, device="cuda")
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        scaled_into(v1, x.contiguous(), 2)
        v2 = torch.empty(32, 32, pin_memory=True)
        v2.copy_(v1, non_blocking=True)
    with torch.cuda.stream(s2):
        s2.wait_stream(s1)
        v3 = v1 * state
        v4 = v1.to("cpu", non_blocking=True)
    return v2, v3, v4


@found
def download_of_a_constant_at_the_end_behind_a_graph_break(s1, s3, /, x, y, ready):
    with torch.cuda.stream(s1):
        ready.wait()
        with torch.cuda.stream(s3):
            s3.wait_event(ready)
            v1 = int(y.detach().amax().item())
            v2 = torch.full((32, 32), 1.0 if v1 > 0 else 0.0, device="cuda")
            v3 = x.sum(0, keepdim=True)
            v4 = v2.cpu()
    return v3, v4


@found
def download_of_a_constant_blocks(s1, s3, buffer, /, x, state, ready):
    with torch.cuda.stream(s3):
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v1 = torch.zeros_like(buffer)
        s3.wait_stream(current)
        v2 = (x.sum()).clamp(-2, 2)
        v3 = (buffer.sum()).clamp(-2, 2)
        v4 = v3 + state
        done1 = s1.record_event()
        done1.wait()
        v5 = v1.cpu()
    return v2, v3, v4, v5


@found
def download_of_a_constant_in_a_frame_without_streams(s1, buffer, /):
    current = torch.cuda.current_stream()
    current.wait_stream(s1)
    torch._dynamo.graph_break()
    buffer.zero_()
    v1 = buffer.cpu()
    return (v1,)


@found
def download_of_a_copy_that_is_left_out_behind_an_upload(s1, buffer, /, y, state, pinned):
    v1 = buffer + state
    v2 = v1 + buffer
    with torch.cuda.stream(s1):
        v3 = torch.ones(32, 32, device="cuda")
    y.copy_(state)
    v4 = pinned.to("cuda")
    v5 = y.cpu()
    current.wait_stream(s1)
    return v1, v2, v3, v4, v5


@found
def download_that_blocks_behind_an_operator_that_writes_a_buffer(s1, buffer, /, state):
    add_to(buffer, state)
    buffer.clamp_(-2, 2)
    v1 = buffer.cpu()
    torch._dynamo.graph_break()
    with torch.cuda.stream(s1):
        v2 = buffer * 2
    current.wait_stream(s1)
    return v1, v2


@found
def event_behind_a_copy_to_the_host_between_graphs(s1, e1, w0, buffer, /, x):
    x[4:20].copy_(buffer[8:24])
    v1 = x.to("cpu", non_blocking=True)
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v2 = buffer @ w0
        e1.record(s1)
    current.wait_event(e1)
    return v1, v2


# Host computes, after a copy that blocks it, with what an earlier frame downloads.
@found
def host_computes_after_a_copy_that_blocks_with_what_an_earlier_frame_downloads(s1, buffer, /, x, y):
    v1 = torch.zeros(32, 32, pin_memory=True)
    v1[4:20].copy_(buffer[8:24], non_blocking=True)
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        torch._dynamo.graph_break()
        v2 = x + 1
        v3 = y.cpu()
        v4 = v1.clamp(-1, 1)
    current.wait_stream(s1)
    return v1, v2, v3, v4


@found
def host_memory_of_an_upload_is_not_written_by_the_next_host_operation(s1, /, y):
    v1 = y.cpu()
    h1 = v1 * 2
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        d1 = h1.to("cuda", non_blocking=True)
        h3 = v1.cumsum(0) + 3
        d3 = h3.to("cuda", non_blocking=True)
    current.wait_stream(s1)
    return v1, d1, d3


# Host waits for a copy that pageable memory ends: what the code can't count on makes no wait of its own needless.
@found
def host_waits_for_a_copy_that_pageable_memory_ends(buffer, /, x, out):
    done1 = torch.cuda.Event()
    done1.record()
    torch._foreach_copy_([x[2:4], x[8:20]], [out[6:8], out[12:24]], non_blocking=True)
    out[3].copy_(buffer[5], non_blocking=True)
    v1 = torch.zeros(32, 32, pin_memory=True)
    v1[4:20].copy_(x[8:24], non_blocking=True)
    return (v1,)


@found
def input_is_read_through_a_view_of_a_copy_of_it(s1, s2, buffer, /, x, y, state, pinned):
    current.wait_stream(s2)
    state.copy_(x)
    v1 = y + x
    v2 = y - x
    v3 = pinned.to("cuda")
    v4 = F.dropout(buffer, 0.5)
    with torch.cuda.stream(s1):
        v5 = v2.clone()
        y[:, ::2].add_(state[:, ::2])
        y.clamp_(-2, 2)
    current.wait_stream(s1)
    return v2, v3, v4, v5


# Memory is read, through a clone that a pass drops, after its stream waited for the clone.
@found
def memory_of_a_dropped_clone_is_read_after_its_stream_waited(s1, /, pinned):
    with torch.cuda.stream(s1):
        v1 = pinned.to("cuda", non_blocking=True)
    current.wait_stream(s1)
    v2 = v1.clone()
    s1.wait_stream(current)
    v2.mul_(2)
    return (v2,)


@found
def memory_of_another_regions_side_stream(s1, /, state, pinned):
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1 = pinned.to("cuda", non_blocking=True)
    current.wait_stream(s1)
    v2 = v1.amax(1, keepdim=True)
    with torch.cuda.stream(s1):
        v3 = state * 2
    current.wait_stream(s1)
    return v2, v3


@found
def parts_of_a_recorded_tensor_that_a_copy_of_a_list_fills(s1, /, x, pinned):
    v1 = x + 1
    v1.record_stream(s1)
    v2 = v1 * 2
    torch._foreach_copy_([v1[2:4], v1[8:20]], [pinned[6:8], pinned[12:24]], non_blocking=True)
    return v1, v2


@found
def record_behind_what_the_host_computes(s4, e2, buffer, /, x):
    v1 = x.cpu()
    v2 = int(buffer.detach().amax().item())
    v3 = torch.full((32, 32), 1.0 if v2 > 0 else 0.0, device="cuda")
    v4 = v1 * 2
    e2.record(s4)
    return v1, v3, v4


@found
def record_stream_of_an_upload_on_another_stream(s1, buffer, /, y, state, pinned):
    v1 = buffer + state
    v2 = y.t()
    v3 = pinned.to("cuda", non_blocking=True)
    v4 = y.relu()
    with torch.cuda.stream(s1):
        v3.record_stream(s1)
    return v1, v2, v3, v4


@found
def update_of_another_streams_value_read_on_a_stream_of_a_block_around_a_graph_break(s1, s2, /, y, state, ready):
    with torch.cuda.stream(s2):
        ready.wait()
        v1 = state.relu()
        state.clamp_(-2, 2)
        v2 = state.cpu()
    v1[:, ::2].add_(y[:, ::2])
    with torch.cuda.stream(s1):
        torch._dynamo.graph_break()
        done1 = torch.cuda.Event()
        done1.record(current)
        s1.wait_event(done1)
        v3 = v1.detach().amax(1, keepdim=True)
    return v2, v3


@found
def upload_of_host_memory_that_is_returned(s1, s2, buffer, /, state):
    v1 = buffer.cpu()
    with torch.cuda.stream(s1):
        buffer.add_(state)
        buffer.clamp_(-2, 2)
        with torch.cuda.stream(s2):
            v2 = v1.to("cuda", non_blocking=True)
    current.wait_stream(s1)
    current.wait_stream(s2)
    return v1, v2


@found
def upload_of_which_another_stream_reads_a_copy(s1, /, x, pinned, n):
    v1 = pinned.to("cuda")
    with torch.cuda.stream(s1):
        v2 = v1.detach().clone()
        for _ in range(n):
            v2 = v2.clamp(-2, 2) + 1
        x[4:20].copy_(v1[8:24])
    current.wait_stream(s1)
    return v1, v2


@found
def upload_that_blocks_behind_an_update_of_a_buffer(s1, buffer, sleep, /, state, pinned):
    buffer.zero_()
    v1 = pinned.to("cuda")
    v2 = v1 + state
    v3 = torch.ones(32, 32, device="cuda")
    torch._dynamo.graph_break()
    with torch.cuda.stream(s1):
        v4 = sleep(state) + buffer
    done1 = torch.cuda.Event()
    done1.record(s1)
    current.wait_event(done1)
    return v1, v2, v3, v4


@found
def upload_that_is_returned_and_copied_to_another_result(s1, /, state, pinned):
    v3 = state.clone()
    v5 = v3.view(32, 32)
    v6 = pinned.to("cuda")
    with torch.cuda.stream(s1):
        v3.copy_(v6)
    done1 = s1.record_event()
    done1.wait()
    return v3, v5, v6


@found
def upload_that_nobody_reads_blocks(s1, s2, /, x, y, pinned):
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v1 = pinned.to("cuda")
        done1 = s1.record_event()
        v1.copy_(x)
        v2 = x + y
        v3 = y @ v1.sign()
    current.wait_stream(s2)
    return v1, v2, v3


# View by a call (`view_as_real`) behind a record on a side stream: taken for one on that stream, without a device.
@found(loads="[0, 1, 2]")
def view_by_a_call_behind_a_record(s1, e1, /, x, y, state, pinned):
    v1 = pinned.to("cuda")
    e1.record(s1)
    e1.wait()
    v2 = y.clamp(-1, 1) @ state.sign()
    v3 = torch.view_as_real(torch.complex(v1, x))[..., 0]
    return v1, v2 + v1, v3


@found
def view_of_an_input_is_copied_beside_the_stream_that_updates_it(s1, w1, buffer, /, y, state, pinned):
    v1 = buffer + state
    v2 = pinned.to("cuda")
    with torch.cuda.stream(s1):
        v3 = y + v1
        v4 = v2.relu()
        v5 = v3 - v1
        v6 = state.t()
        v6.clamp_(-2, 2)
        v7 = buffer @ w1
        v8 = state[8:24]
    current.wait_stream(s1)
    return v2, v5, v6, v7, v8


@found
def work_behind_a_copy_that_blocks_the_host(s1, buffer, /, x, state, pinned):
    buffer.copy_(state)
    v1 = pinned.to("cuda")
    with torch.cuda.stream(s1):
        v2 = x + buffer
    current.wait_stream(s1)
    return v1, v2


@found
def constant_that_blocks_the_host_in_memory_which_an_earlier_frame_uploads(s1, buffer, /, out):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        buffer.copy_(out, non_blocking=True)
        torch._dynamo.graph_break()
        v1 = torch.ones(32, 32, device="cuda")
        out.copy_(v1)
    current.wait_stream(s1)
    return v1


@found
def constant_that_is_copied_to_host_memory_which_an_earlier_frame_uploads(s1, buffer, /, out):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        buffer.copy_(out, non_blocking=True)
        torch._dynamo.graph_break()
        v1 = torch.ones(32, 32, device="cuda")
        out.copy_(v1, non_blocking=True)
    current.wait_stream(s1)
    return v1


@found
def update_by_a_call_of_memory_that_a_side_stream_allocated_between_partitions(s1, /, z, pinned):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = pinned.to("cuda", non_blocking=True)
    current.wait_stream(s1)
    v2 = torch.view_as_complex(v1.view(32, 16, 2))
    v3 = v2.index_put((torch.arange(2, device="cuda"),), z[0, :16])
    return (v3,)


# The kernel of the host that would have made the constant there read the device's memory.
@found
def constant_in_another_type_whose_copy_to_the_host_is_counted_on(e1, /, y, pinned):
    v1 = pinned.to("cuda", non_blocking=True)
    y.view(torch.int32).zero_()
    e1.record()
    v2 = y.cpu()
    return v1, v2
