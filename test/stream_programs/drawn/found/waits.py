"""Programs without a backward in which the host waits for a stream, an event or the device."""

from stream_programs.drawn.found import found
from stream_programs.drawn.kit import add_to, current, double, F, torch


@found
def concatenation_of_two_partitions_read_on_another_stream(s2, e2, buffer, sleep, /, x, y, state, n):
    torch.cuda.synchronize()
    v1 = x.cpu()
    s2.synchronize()
    v2 = state.detach().clone()
    for _ in range(n):
        v2 = v2.clamp(-2, 2) + 1
    v2.add_(y)
    v3 = y.clone()
    x.record_stream(s2)
    v4 = sleep(buffer) * 3
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v5 = v3.t().contiguous()
        v6 = torch.cat([v4, v2])[16:48]
        v7 = v1.clamp(-1, 1)
        add_to(v5, x)
        v8 = v5[3:4]
        v9 = F.dropout(v3, 0.5)
    e2.record(s2)
    e2.wait()
    return v1, v6, v7, v8, v9


@found
def copy_that_blocks_the_host_orders_a_stream_that_is_only_synchronized(s1, /, x, state, pinned):
    s1.synchronize()
    v1 = state + x
    v2 = pinned.to("cuda")
    v3 = v2 + x
    return v1, v2, v3


@found
def download_of_a_constant_that_is_returned(s1, s3, s4, w1, /, x, state, ready):
    v1 = double(state) @ w1
    with torch.cuda.stream(s3):
        s3.wait_event(ready)
        v2 = torch.zeros_like(x)
        torch.cuda.synchronize()
        v3 = double(state) * 3
        with torch.cuda.stream(s4):
            done1 = torch.cuda.Event()
            done1.record(s3)
            s4.wait_event(done1)
            v4 = torch.where(v3 > 0, v3, v1)
            current.wait_stream(s1)
            v5 = v2.cpu()
            v6 = v5 + 1
    current.wait_stream(s4)
    return v4, v5, v6


# Half of a dimension that an update left alone: the host may read it, for it had waited for what is there.
@found
def half_of_a_dimension_that_an_update_left_alone(s1, /, y, pinned):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = torch.empty(32, 32, device="cuda")
        v1.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        v1[:, 2][3:9] += y[3:9, 0]
        v2 = v1.unflatten(0, (2, 16))[1]
    current.wait_stream(s1)
    return (v2,)


@found
def host_computes_behind_a_synchronisation_with_what_an_earlier_frame_downloads(s1, buffer, /, y, state):
    v1 = buffer.relu()
    v2 = (y > 0).float()
    done1 = torch.cuda.Event()
    done1.record(current)
    v3 = state.to("cpu", non_blocking=True)
    v4 = y + 1
    with torch.cuda.stream(s1):
        done1.wait()
        v5 = v2 - y
        torch._dynamo.graph_break()
        v6 = v1.clamp(-1, 1) * v5
    v7 = v2.clone()
    v8 = F.dropout(state, 0.5)
    current.wait_stream(s1)
    y[4:20].copy_(v5[8:24])
    y.clamp_(-2, 2)
    torch.cuda.synchronize()
    v9 = v3 + 1
    return v3, v6, v7, v8, v9


@found
def host_memory_is_written_back_before_a_synchronisation(buffer, /, out):
    v1 = buffer.to("cpu", non_blocking=True)
    out.copy_(buffer, non_blocking=True)
    current.synchronize()
    v2 = v1.to("cuda")
    return v1, v2


@found
def host_memory_that_is_read_behind_an_events_synchronisation(e1, /, x, pinned):
    v1 = pinned.to("cuda")
    v2 = torch.zeros(32, 32, pin_memory=True)
    v2[4:20].copy_(v1[8:24], non_blocking=True)
    v3 = x.t().contiguous()
    e1.record()
    e1.synchronize()
    v4 = v2 + 1
    v5 = torch.zeros(32, 32, pin_memory=True)
    v5[4:20].copy_(v1[8:24], non_blocking=True)
    return v1, v2, v3, v4, v5


@found
def host_reads_a_download_of_another_region(s1, buffer, /, state):
    v1 = buffer.to("cpu", non_blocking=True)
    v2 = buffer + state
    with torch.cuda.stream(s1):
        current.synchronize()
        v3 = v1 + 1
    return v1, v2, v3


# Product that is put into an input behind a synchronisation of the device, which waits for a reader of the input.
@found
def product_that_is_put_into_an_input_behind_a_synchronisation(s1, s2, sleep, /, x, y, state):
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v1 = sleep(state) * 2
    torch._dynamo.graph_break()
    s2.wait_stream(current)
    with torch.cuda.stream(s2):
        v2 = x * 3
    current.wait_stream(s2)
    v3 = torch.mm(x[:16], y)
    torch.cuda.synchronize()
    state[:16].copy_(v3)
    return v1, v2


@found
def result_that_is_copied_and_the_copy_is_read_behind_a_wait(s1, s2, s3, buffer, /, y):
    v1 = buffer - y
    torch.cuda.synchronize()
    with torch.cuda.stream(s2):
        v2 = torch.ones(32, 32, device="cuda")
        v3 = v1.t().clone(memory_format=torch.contiguous_format)
        with torch.cuda.stream(s3):
            s3.wait_stream(s2)
            v2.copy_(v3)
            s1.wait_stream(s3)
            v4 = (v2.cumsum(0)).clamp(-2, 2)
    current.wait_stream(s2)
    current.wait_stream(s3)
    return v3, v4


@found
def returned_view_behind_a_synchronization(s1, s2, buffer, sleep, /, x, y, state, ready):
    y.add_(state)
    y.clamp_(-2, 2)
    with torch.cuda.stream(s1):
        ready.wait()
        v1 = int(x.detach().amax().item())
        v2 = torch.full((32, 32), 1.0 if v1 > 0 else 0.0, device="cuda")
        v3 = buffer.to("cpu", non_blocking=True)
        v4 = v2 * 2
        buffer.record_stream(current)
        v5 = x.relu()
        v6 = v5 - state
        with torch.cuda.stream(s2):
            s2.wait_stream(s1)
            v7 = buffer + v2
            v8 = v6.t().contiguous()
            v9 = sleep(buffer) + x
        done1 = s2.record_event()
        done1.wait()
        x.zero_()
        v10 = v8.clamp(-1, 1) * v9
        with torch.cuda.stream(s2):
            v11 = v8[8:24]
            done1.synchronize()
            v12 = v3 * 2
            v13 = F.dropout(v4, 0.5)
    current.wait_stream(s1)
    current.wait_stream(s2)
    return v3, v10, v11, v12, v13


@found
def row_that_an_update_left_alone_which_the_host_had_waited_for(s3, /, x, y):
    y.relu_()
    with torch.cuda.stream(s3):
        done1 = torch.cuda.Event()
        done1.record(current)
        done1.synchronize()
        y[4:20].copy_(x[8:24])
        v1 = y[3:4]
    return (v1,)


@found
def update_behind_a_synchronisation_that_nobody_joins(s1, buffer, /, state, ready):
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        v1 = buffer + state
        torch.cuda.synchronize()
        buffer.add_(v1)
        buffer.clamp_(-2, 2)
    return (v1,)  # unjoined


@found
def upload_behind_a_synchronisation_of_what_was_downloaded(buffer, /, y, state):
    v1 = buffer.view(32, 32)
    v2 = y.to("cpu", non_blocking=True)
    done1 = torch.cuda.Event()
    done1.record(current)
    done1.synchronize()
    v3 = v2.to("cuda", non_blocking=True)
    v4 = buffer.relu()
    v5 = state.view(32, 32)
    v6 = v1 + v3
    return v2, v3, v4, v5, v6


@found
def what_is_read_behind_a_synchronisation_of_the_device_may_be_of_an_earlier_frame(s1, s2, sleep, /, x, y, n):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = (sleep(x).sum()).clamp(-2, 2)
    torch._dynamo.graph_break()
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        y.clamp_(-2, 2)
        v2 = y - 1
    torch.cuda.synchronize()
    v3 = torch.where(y > 0, y, v1)
    return v2, v3
