"""Programs with a backward."""

from stream_programs.drawn.found import found
from stream_programs.drawn.kit import add_to, current, double, F, scaled_into, torch, trains


@found(train="0")
def block_on_the_ambient_stream_alone(w0, /, x, pinned):
    with torch.cuda.stream(current):
        v1 = pinned.to("cuda")
    v2 = x @ w0
    return v1, v2


@found(train="None")
def columns_of_a_result_that_a_saved_value_is_taken_from(s2, w0, buffer, sleep, /, state, ready):
    v1 = sleep(buffer) + state
    with torch.cuda.stream(s2):
        s2.wait_event(ready)
        v2 = torch.ones(32, 32, device="cuda")
    v3 = sleep(state) @ w0
    done1 = torch.cuda.Event()
    done1.record(s2)
    current.wait_event(done1)
    v1[:, ::2].add_(v2[:, ::2])
    v4 = v1 @ w0
    return v1, v2, v3, v4


@found(train="None")
def concatenation_behind_the_partitions_that_compute_its_parts(s1, e2, w0, buffer, sleep, /, y, state):
    v1 = y * 2
    v1.record_stream(s1)
    v3 = torch.cat([v1, state])[16:48]
    v4 = sleep(v3) @ w0
    v5 = v4.t().contiguous()
    v6 = y.view(32, 32)
    e2.record(s1)
    buffer.clamp_(-2, 2)
    v7 = torch.where(y > 0, y, v5)
    return v4, v5, v6, v7


@found(train="None", misaligned=True)
def complex_input_that_a_later_partition_writes_beside_a_view_of_it(w0, /, x, z, out):
    torch.view_as_real(z).mul_(2)
    z.real.clamp_(-2, 2)
    z.imag.clamp_(-2, 2)
    out.copy_(x, non_blocking=True)
    v1 = torch.empty(32, 32, device="cuda")
    v1.copy_(out, non_blocking=True)
    v2 = x @ w0
    z.real.add_(v1)
    z.real.clamp_(-2, 2)
    z.imag.clamp_(-2, 2)
    return v1, v2


@found(train="0", misaligned=True)
def copy_into_a_saved_input(s1, /, x, y, out, ready):
    s1.wait_event(ready)
    y.copy_(out, non_blocking=True)
    v1 = x.clamp(-1, 1) * y
    v2 = x.cumsum(0)
    return v1, v2


@found(train="0")
def copy_into_an_input_of_what_dies_at_a_graph_break(s1, s2, s3, e2, w0, buffer, /, x, pinned):
    s3.synchronize()
    v1 = pinned.to("cuda", non_blocking=True)
    v2 = x.detach().amax(1, keepdim=True)
    v3 = pinned.to("cuda")
    with torch.cuda.stream(s1):
        buffer.copy_(v1)
        s2.synchronize()
        v4 = buffer[1:]
        with torch.cuda.stream(s3):
            torch._dynamo.graph_break()
    v5 = x @ w0
    e2.record(s1)
    e2.wait()
    return v2, v3, v4, v5


@found(train="0")
def download_of_a_scanned_constant(s1, s2, w0, /, x, state):
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v1 = state @ w0
        v2 = torch.zeros_like(state)
        with torch.cuda.stream(s1):
            s1.wait_stream(s2)
            v3 = v2.cumsum(0)
            v2[1:9] = 3
            v2[4:20].copy_(x[8:24])
            s2.wait_stream(s1)
            v4 = v3.to("cpu", non_blocking=True)
    current.wait_stream(s1)
    return v1, v3, v4


@found(train="0")
def download_that_blocks_between_two_updates_by_operators_and_a_matrix_product(s1, w0, buffer, /, x, y):
    with torch.cuda.stream(s1):
        v0 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    buffer.add_(x.detach())
    buffer.clamp_(-2, 2)
    v1 = (buffer > 0).float()
    v2 = y.cpu()
    add_to(v1, x.detach())
    v3 = x @ w0
    return v0, v1, v2, v3


@found(train="0")
def event_behind_an_update_of_an_earlier_result_that_needs_a_gradient(s2, e1, buffer, /, x, y, state):
    v1 = state + x
    torch._dynamo.graph_break()
    v2 = (v1 > 0).float()
    v3 = buffer.relu()
    with torch.cuda.stream(s2):
        done1 = torch.cuda.Event()
        done1.record(current)
        s2.wait_event(done1)
        add_to(y, state)
        y.clamp_(-2, 2)
        v1.mul_(2)
        e1.record(s2)
    current.wait_event(e1)
    return v1, v2, v3


@found(train="0")
def event_that_is_recorded_anew_behind_a_wait_for_an_earlier_frame(s1, s3, e1, w0, buffer, /, x, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v1 = state.clamp(-1, 1) * buffer
        e1.record(s1)
        torch._dynamo.graph_break()
        with torch.cuda.stream(s3):
            s3.wait_event(e1)
            v1.clamp_(-2, 2)
            e1.record(current)
    v2 = x @ w0
    done1 = torch.cuda.Event()
    done1.record(s1)
    current.wait_event(done1)
    current.wait_stream(s3)
    return v1, v2


@found(train="0")
def gradient_of_an_operator_that_realizes_its_input(s1, sleep, /, x, ready):
    with torch.cuda.stream(s1):
        s1.wait_event(ready)
        v1 = sleep(x) * 3
    done1 = torch.cuda.Event()
    done1.record(s1)
    current.wait_event(done1)
    return (v1,)


@found(train="0")
def gradient_that_is_a_view_by_an_operator_call(s1, buffer, /, x, state):
    v1 = buffer + state
    v2 = torch.zeros_like(state)
    with torch.cuda.stream(s1):
        done1 = torch.cuda.Event()
        done1.record(current)
        s1.wait_event(done1)
        v3 = F.pad(v1, (1, 1))[:, 1:33]
        v4 = torch.view_as_real(torch.complex(x, v3))[..., 0]
    current.wait_stream(s1)
    return v1, v2, v3, v4


@found(train="0")
def gradient_that_is_computed_early_on_a_stream_that_is_joined(s1, w1, /, x, state):
    v3 = state.relu()
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v4 = v3 @ w1
        v6 = v4.detach().amax(1, keepdim=True)
        v8 = v3.clamp(-1, 1) @ v4.sign()
    current.wait_stream(s1)
    return v6, v8


@found(train="0", loads="[0, 1]")
def input_from_which_the_backward_computes_again(s1, s2, /, x, y):
    with torch.cuda.stream(s2):
        s2.wait_stream(torch.cuda.current_stream())
        s2.wait_stream(s1)
        v1 = y.clamp(-1, 1) * x
        s1.wait_stream(s2)
    torch.cuda.current_stream().wait_stream(s1)
    return (v1,)


@found(train="0", loads="[0, 1]")
def input_that_only_the_compiled_backward_reads_after_the_host_waited(s1, e1, /, x, y):
    e1.record(s1)
    current.wait_event(e1)
    v1 = y.clamp(-1, 1) * x
    v2 = int(v1.detach().amax().item())
    v3 = torch.full((32, 32), 1.0 if v2 > 0 else 0.0, device="cuda")
    return v1, v3


@found(train="0", loads="[0]")
def leaf_that_a_side_stream_reads_first_and_for_nothing(s1, w0, /, x):
    with torch.cuda.stream(s1):
        v1 = x.t()
        s1.wait_stream(current)
        v2 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    v3 = x @ w0
    return v2, v3


@found(train="0")
def mask_for_the_backward_of_an_input_behind_a_copy_that_blocks(s1, buffer, /, x, state, pinned):
    buffer.mul_(2)
    v1 = x[:, 5:6]
    v2 = pinned.to("cuda")
    with torch.cuda.stream(s1):
        v3 = state.cpu()
        v4 = v1.clamp(-1, 1) * buffer
        v5 = v4.detach().cumsum(0)
        v6 = pinned.to("cuda")
        v7 = state.sum(0, keepdim=True)
        state[1:9] = 3
        v8 = v6.t().clone(memory_format=torch.contiguous_format)
    current.wait_stream(s1)
    return v4, v2, v3, v5, v7, v8


@found(train="0")
def one_of_several_outputs_of_a_kernel(s1, w0, /, x, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        state.clamp_(-2, 2)
        v1 = F.dropout(state, 0.5)
    v2 = x @ w0
    current.wait_stream(s1)
    return v1, v2


@found(train="None")
def promised_value_absorbed_before_the_record(s1, e1, w0, buffer, sleep, /, y, state):
    v1 = torch.where(buffer > 0, buffer, state)
    v2 = v1 + state
    s1.wait_stream(current)
    v3 = y * 2
    v2.mul_(2)
    e1.record(s1)
    add_to(v3, v2)
    return (sleep(v3) @ w0,)


@found(train="0")
def returned_views_of_a_leaf_on_two_side_streams(s1, s2, /, x, state):
    v1 = state + x
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v2 = x.t()
        v3 = state * 2
    with torch.cuda.stream(s2):
        s2.wait_stream(current)
        v4 = v2[1:]
        v5 = state * 3
    current.wait_stream(s1)
    current.wait_stream(s2)
    v6 = v3 @ v5
    return v1, v4, v6


@found(train="None", loads="[0]")
def saved_view_of_what_is_computed_after_the_host_waited(s1, w0, buffer, sleep, /, y):
    v1 = torch.empty(32, 32, pin_memory=True)
    v1.copy_(buffer, non_blocking=True)
    torch.cuda.synchronize()
    v2 = sleep(y) @ w0
    return v1, v2


# Update of memory of another stream in an autograd function: the result was taken for memory of the side stream.
@found
def update_of_memory_of_another_stream_in_an_autograd_function(k):
    s1 = k.stream()

    class Updated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            current = torch.cuda.current_stream()
            v1, v2 = x * 2, torch.empty_like(x)
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                F.relu(v1, inplace=True)
                torch.mul(y, 3, out=v2)
            current.wait_stream(s1)
            return v1, v2

        @staticmethod
        def backward(ctx, g1, g2):
            return g1 * 2, g2 * 3

    def fn(x, y):
        return Updated.apply(x, y)

    return trains(k, fn, 0, [])


@found(train="0")
def updated_part_of_a_concatenation_that_a_later_partition_reads(s3, w0, buffer, /, x, y, out):
    buffer[4:20].copy_(out[8:24], non_blocking=True)
    buffer[torch.arange(0, 2, device="cuda") * 0] = 1
    v1 = torch.empty(32, 32, pin_memory=True)
    v1.copy_(y, non_blocking=True)
    with torch.cuda.stream(s3):
        done1 = current.record_event()
        done1.wait()
        v2 = torch.stack([buffer, y]).sum(0)
        v3 = torch.empty(32, 32, pin_memory=True)
        v3.copy_(y, non_blocking=True)
        torch.cuda.synchronize()
        v4 = v1.clamp(-1, 1)
    v5 = x @ w0
    return v1, v2, v3, v4, v5


@found(train="0")
def view_of_a_leaf_on_a_side_stream_after_a_read_on_the_callers(s1, /, x, state):
    v1 = x.sigmoid()
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v2 = state * 2
        v3 = x.squeeze()
    current.wait_stream(s1)
    return v2, v3


@found(train="0")
def view_of_a_result_is_made_anew_behind_a_graph_break(s3, buffer, /, x, y, state, ready, n):
    v1 = torch.zeros_like(state)
    with torch.cuda.stream(s3):
        s3.wait_event(ready)
        v2 = buffer.relu()
        s3.wait_stream(current)
        v3 = x + v1 if n > 4 else x + 1
        v4 = v2[:, 5:6]
        with torch.cuda.stream(current):
            v5 = (buffer.sum()).clamp(-2, 2)
            torch._dynamo.graph_break()
            v6 = y[:, 1:]
            state[1:9] = 3
            state.clamp_(-2, 2)
            done1 = s3.record_event()
            done1.wait()
            v7 = v4 + 1
            v2.mul_(2)
    return v3, v4, v5, v6, v7


@found(train="0")
def view_of_an_output_that_needs_no_gradient(s1, /, x, state, pinned):
    v1 = x.clamp(-1, 1) @ state.sign()
    s1.wait_stream(current)
    with torch.cuda.stream(s1):
        v2 = torch.zeros_like(v1)
        v3 = v2[:, 1:]
        torch.add(v2, x.detach(), out=v2)
        v4 = state + x
    current.wait_stream(s1)
    return v3, v4


@found(train="0")
def view_of_an_update_that_is_made_anew_behind_the_backward(w0, buffer, /, x, state):
    v1 = double(buffer.detach())
    v1.zero_()
    v2 = state.to("cpu", non_blocking=True)
    v3 = v1.view(16, 64)
    torch.cuda.synchronize()
    v4 = v2 + 1
    v5 = x @ w0
    return v2, v3, v4, v5


@found(train="0")
def view_of_an_upload_that_an_earlier_partition_allocated(s3, w0, /, x, pinned):
    with torch.cuda.stream(s3):
        s3.wait_stream(current)
        v7 = torch.empty(32, 32, device="cuda")
        v7.copy_(pinned, non_blocking=True)
        v8 = v7.clone()
    v10 = torch.view_as_complex(v7.view(32, 16, 2))
    v11 = x @ w0
    current.wait_stream(s3)
    return v8, v10, v11


@found(train="0")
def wait_of_a_backward_for_what_the_engine_has_ordered(s1, w1, /, x, y, state):
    with torch.cuda.stream(s1):
        s1.wait_stream(current)
        v3 = torch.empty(32, 32, device="cuda")
        scaled_into(v3, y.contiguous(), 2)
        v4 = (v3.sum(0, keepdim=True)).clamp(-2, 2)
        v5 = x[:, 1:]
        v6 = F.cross_entropy(state, torch.zeros(32, dtype=torch.long, device="cuda"))
        v7 = x @ w1
    current.wait_stream(s1)
    return v4, v5, v6, v7


@found(train="0")
def work_behind_a_host_synchronisation(s1, buffer, /, x, y, state):
    v1 = (x.sum()).clamp(-2, 2)
    current.synchronize()
    with torch.cuda.stream(s1):
        v2 = (state > 0).float()
        v3 = v2 + state
        buffer.add_(y)
        buffer.clamp_(-2, 2)
    current.wait_stream(s1)
    return v1, v2, v3


@found(train="0", loads="[0]")
def results_of_unbind_that_are_views_of_a_misaligned_leaf(s1, buffer, /, x):
    current.wait_stream(s1)
    buffer.add_(x.detach())
    buffer.clamp_(-2, 2)
    v1 = x.unbind(0)[1:4]
    with torch.cuda.stream(s1):
        v2 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    return v1, v2


@found(train="0", loads="[0]")
def view_of_a_misaligned_leaf_that_is_returned_and_another_that_is_saved(s1, w0, buffer, /, x):
    current.wait_stream(s1)
    buffer.add_(x.detach())
    buffer.clamp_(-2, 2)
    v3 = x.t() @ w0
    v1 = x.unbind(0)[1:4]
    with torch.cuda.stream(s1):
        v2 = torch.ones(32, 32, device="cuda")
    current.wait_stream(s1)
    return v1, v2, v3
