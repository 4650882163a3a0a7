"""Programs that random ones have shrunk to, each named after what went wrong when it was compiled."""

from __future__ import annotations

import textwrap

from stream_programs.drawn.writer import Written


PROGRAMS: dict[str, Written] = {}


def _add(name: str, inputs: str, text: str) -> None:
    text = textwrap.dedent(text).lstrip()
    copies = any(call in text for call in (".cpu()", '.to("cuda")', ".item()"))
    PROGRAMS[name] = Written(
        text,
        tuple(inputs.split()),
        train="trains(" in text,
        random="dropout" in text or "rand" in text,
        unjoined="# unjoined" in text,
        host="cpu" in text or "out" in inputs,
        fullgraph="graph_break" not in text and ".item()" not in text,
        host_waits="synchronize(" in text and not copies,
        host_blocks="synchronize(" in text or copies,
        misaligned="loads=" in text,
        loads="loads=" in text,
    )


_add(
    "frame_that_only_waits_and_computes_nothing_that_is_read",
    "state ready",
    """
    def build(k):
        s1 = k.stream()

        def fn(state, ready):
            with torch.cuda.stream(s1):
                ready.wait()
                v1 = state.amax(1, keepdim=True)
                torch._dynamo.graph_break()
                v2 = state + 1
            torch.cuda.current_stream().wait_stream(s1)
            return v2,

        return calls(k, fn)
    """,
)
_add(
    "frame_of_views_that_only_waits",
    "state ready",
    """
    def build(k):
        s1 = k.stream()

        def fn(state, ready):
            s1.wait_event(ready)
            v1 = state[1:]
            torch._dynamo.graph_break()
            with torch.cuda.stream(s1):
                v2 = state + 1
            torch.cuda.current_stream().wait_stream(s1)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "waits_that_stay_are_made_once",
    "x",
    """
    def build(k):
        s1 = k.stream()

        def fn(x):
            s1.wait_stream(torch.cuda.current_stream())
            return x,

        return calls(k, fn)
    """,
)
_add(
    "concatenation_of_inputs_on_a_side_stream",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                buffer.add_(state)
                buffer.clamp_(-2, 2)
                torch._dynamo.graph_break()
                v1 = torch.cat([x, buffer])[16:48]
                x.add_(buffer)
                x.clamp_(-2, 2)
            current.wait_stream(s1)
            return v1,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "foreach_on_a_side_stream",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                y.mul_(2)
                torch._dynamo.graph_break()
                v1, v2 = torch._foreach_add([x, y], 1)
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "memory_handed_on_behind_the_callers_event",
    "ready",
    """
    def build(k):
        s1 = k.stream()

        def fn(ready):
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = torch.ones(32, 32, device="cuda")
            done1 = s1.record_event()
            done1.wait()
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "work_behind_a_host_synchronisation",
    "x y state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, state):
            current = torch.cuda.current_stream()
            v1 = (x.sum()).clamp(-2, 2)
            current.synchronize()
            with torch.cuda.stream(s1):
                v2 = (state > 0).float()
                v3 = v2 + state
                buffer.add_(y)
                buffer.clamp_(-2, 2)
            current.wait_stream(s1)
            return v1, v2, v3

        return trains(k, fn, 0, [], [buffer])
    """,
)
_add(
    "work_behind_a_copy_that_blocks_the_host",
    "x state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state, pinned):
            current = torch.cuda.current_stream()
            buffer.copy_(state)
            v1 = pinned.to("cuda")
            with torch.cuda.stream(s1):
                v2 = x + buffer
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "event_behind_a_copy_to_the_host_between_graphs",
    "x",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()
        w0 = weight(k)
        buffer = k.parameter(32, 32)

        def fn(x):
            current = torch.cuda.current_stream()
            x[4:20].copy_(buffer[8:24])
            v1 = x.to("cpu", non_blocking=True)
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v2 = buffer @ w0
                e1.record(s1)
            current.wait_event(e1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "copy_to_the_host_of_what_is_written_later",
    "state out",
    """
    def build(k):
        s1 = k.stream()

        def fn(state, out):
            current = torch.cuda.current_stream()
            out.copy_(state, non_blocking=True)
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                state[1:9] = 3
            current.wait_stream(s1)
            return state * 2,

        return calls(k, fn)
    """,
)
_add(
    "gradient_of_an_operator_that_realizes_its_input",
    "x ready",
    """
    def build(k):
        s1 = k.stream()
        sleep = k.sleep

        def fn(x, ready):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = sleep(x) * 3
            done1 = torch.cuda.Event()
            done1.record(s1)
            current.wait_event(done1)
            return v1,

        return trains(k, fn, 0, [])
    """,
)
_add(
    "one_of_several_outputs_of_a_kernel",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        w0 = weight(k, True)

        def fn(x, state):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                state.clamp_(-2, 2)
                v1 = F.dropout(state, 0.5)
            v2 = x @ w0
            current.wait_stream(s1)
            return v1, v2

        return trains(k, fn, 0, [w0])
    """,
)
_add(
    "slices_of_a_returned_concatenation_on_two_streams",
    "y state",
    """
    def build(k):
        s1, s2 = k.stream(), k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "scatter_that_a_pass_makes_anew",
    "y",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y):
            current = torch.cuda.current_stream()
            v1 = y * 2
            v2 = v1 + buffer
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v1[4:20].copy_(v2[8:24])
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "zeroed_on_a_side_stream_then_added_to",
    "x state ready",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state, ready):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                buffer.zero_()
            current.wait_stream(s1)
            buffer[:, ::2].add_(state[:, ::2])
            return x,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "result_updated_in_place_and_left_unjoined",
    "state y",
    """
    def build(k):  # unjoined
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state, y):
            current = torch.cuda.current_stream()
            v1 = y + state
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v1.relu_()
            return v1,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "host_reads_a_download_of_another_region",
    "state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state):
            current = torch.cuda.current_stream()
            v1 = buffer.to("cpu", non_blocking=True)
            v2 = buffer + state
            with torch.cuda.stream(s1):
                current.synchronize()
                v3 = v1 + 1
            return v1, v2, v3

        return calls(k, fn, [buffer])
    """,
)
_add(
    "memory_of_another_regions_side_stream",
    "state pinned",
    """
    def build(k):
        s1 = k.stream()

        def fn(state, pinned):
            current = torch.cuda.current_stream()
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v1 = pinned.to("cuda", non_blocking=True)
            current.wait_stream(s1)
            v2 = v1.amax(1, keepdim=True)
            with torch.cuda.stream(s1):
                v3 = state * 2
            current.wait_stream(s1)
            return v2, v3

        return calls(k, fn)
    """,
)
_add(
    "copy_that_blocks_the_host_orders_a_stream_that_is_only_lent_to",
    "state",
    """
    def build(k):
        s4 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state):
            state.add_(buffer)
            state.clamp_(-2, 2)
            v1 = buffer.cpu()
            buffer.record_stream(s4)
            return v1,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "copy_that_blocks_the_host_orders_a_stream_that_is_only_synchronized",
    "x state pinned",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, state, pinned):
            s1.synchronize()
            v1 = state + x
            v2 = pinned.to("cuda")
            v3 = v2 + x
            return v1, v2, v3

        return calls(k, fn)
    """,
)
_add(
    "host_memory_of_an_upload_is_not_written_by_the_next_host_operation",
    "y",
    """
    def build(k):
        s1 = k.stream()

        def fn(y):
            current = torch.cuda.current_stream()
            v1 = y.cpu()
            h1 = v1 * 2
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                d1 = h1.to("cuda", non_blocking=True)
                h3 = v1.cumsum(0) + 3
                d3 = h3.to("cuda", non_blocking=True)
            current.wait_stream(s1)
            return v1, d1, d3

        return calls(k, fn)
    """,
)
_add(
    "upload_of_host_memory_that_is_returned",
    "state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state):
            current = torch.cuda.current_stream()
            v1 = buffer.cpu()
            with torch.cuda.stream(s1):
                buffer.add_(state)
                buffer.clamp_(-2, 2)
                with torch.cuda.stream(s2):
                    v2 = v1.to("cuda", non_blocking=True)
            current.wait_stream(s1)
            current.wait_stream(s2)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "clone_that_a_pass_drops_is_read_late",
    "x",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x):
            current = torch.cuda.current_stream()
            v1 = buffer.clone()
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v2 = x * 2
            v3 = x @ v1.sign()
            current.wait_stream(s1)
            return v2, v3

        return calls(k, fn, [buffer])
    """,
)
_add(
    "memory_of_another_stream_given_as_out",
    "y state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "slice_of_another_streams_memory_updated",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v1 = x + y
            s2.wait_stream(s1)
            with torch.cuda.stream(s2):
                v1[4:20].copy_(y[8:24])
            current.wait_stream(s1)
            current.wait_stream(s2)
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "update_of_a_slice_whose_sum_reads_what_it_replaced",
    "y state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "returned_input_that_another_stream_reads",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "promised_value_absorbed_before_the_record",
    "y state",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(y, state):
            current = torch.cuda.current_stream()
            v1 = torch.where(buffer > 0, buffer, state)
            v2 = v1 + state
            s1.wait_stream(current)
            v3 = y * 2
            v2.mul_(2)
            e1.record(s1)
            add_to(v3, v2)
            return sleep(v3) @ w0,

        return trains(k, fn, None, [w0], [buffer])
    """,
)
_add(
    "read_on_another_stream_realized_for_an_operator_that_is_known",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state):
            current = torch.cuda.current_stream()
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
            return v2,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "view_of_an_output_that_needs_no_gradient",
    "x state pinned",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, state, pinned):
            current = torch.cuda.current_stream()
            v1 = x.clamp(-1, 1) @ state.sign()
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v2 = torch.zeros_like(v1)
                v3 = v2[:, 1:]
                torch.add(v2, x.detach(), out=v2)
                v4 = state + x
            current.wait_stream(s1)
            return v3, v4

        return trains(k, fn, 0, [])
    """,
)
_add(
    "blocking_copy_ahead_of_a_partition_on_its_stream",
    "x y state",
    """
    def build(k):
        s1 = k.stream()
        s3 = k.stream()
        w0 = weight(k)
        sleep = k.sleep

        def fn(x, y, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "concatenation_of_two_partitions",
    "x y pinned",
    """
    def build(k):
        s3 = k.stream()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, pinned):
            x[:, ::2].add_(y[:, ::2])
            x.clamp_(-2, 2)
            v1 = pinned.to("cuda")
            with torch.cuda.stream(s3):
                v2 = y * 2
                v3 = torch.cat([v1, y])[16:48]
                v4 = sleep(y) + buffer
            done1 = s3.record_event()
            done1.wait()
            return v1, v2, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "concatenation_of_two_partitions_read_on_another_stream",
    "x y state n",
    """
    def build(k):
        s2 = k.stream()
        e2 = torch.cuda.Event()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, state, n):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "block_on_the_ambient_stream_alone",
    "x pinned",
    """
    def build(k):
        w0 = weight(k, True)

        def fn(x, pinned):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(current):
                v1 = pinned.to("cuda")
            v2 = x @ w0
            return v1, v2

        return trains(k, fn, 0, [w0])
    """,
)
_add(
    "memory_of_a_local_variable_behind_a_graph_break",
    "x y state ready n",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()
        buffer = k.parameter(32, 32)

        def fn(x, y, state, ready, n):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "out_of_the_callers_memory_outside_of_a_stream_block",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y):
            current = torch.cuda.current_stream()
            torch.add(x, buffer, out=x)
            x.clamp_(-2, 2)
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v1 = x + y
            return v1,

        return calls(k, fn, [buffer])  # unjoined
    """,
)
_add(
    "view_of_a_constant_of_another_stream",
    "x y pinned n",
    """
    def build(k):
        s1 = k.stream()
        sleep = k.sleep

        def fn(x, y, pinned, n):
            current = torch.cuda.current_stream()
            v1 = pinned.to("cuda")
            v2 = x.cumsum(0)
            v3 = torch.ones(32, 32, device="cuda")
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v4 = v2.t().contiguous()
                v5 = (sleep(v4) + v4).clamp(-2, 2) if n > 0 else (sleep(v4) + v4).clamp(-2, 2)
                v6 = double(y.detach())
                v7 = v3[3:4]
            return v1, v4, v5, v6, v7

        return calls(k, fn)  # unjoined
    """,
)
_add(
    "copied_memory_is_downloaded_on_another_stream",
    "x state out ready",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state, out, ready):
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = buffer + state
                state.copy_(buffer)
            done1 = s1.record_event()
            done1.wait()
            v2 = state + x
            out.copy_(state, non_blocking=True)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "host_computes_behind_a_synchronisation",
    "x y state ready",
    """
    def build(k):
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, state, ready):
            current = torch.cuda.current_stream()
            v1 = buffer.relu()
            v2 = sleep(y) + state
            v3 = state.clamp(-1, 1) @ buffer.sign()
            v4 = torch.ones(32, 32, device="cuda")
            v5 = state[:, ::2]
            v6 = v3.view(16, 64)
            v7 = y.sum(1, keepdim=True)
            v8 = int(state.detach().amax().item())
            v9 = torch.full((32, 32), 1.0 if v8 > 0 else 0.0, device="cuda")
            v10 = double(v6.detach())
            current.wait_event(ready)
            v11 = v9.to("cpu", non_blocking=True)
            v12 = x.cumsum(0)
            current.synchronize()
            v13 = v11 * 2
            return v10, v11, v12, v13

        return trains(k, fn, 0, [], [buffer])
    """,
)
_add(
    "copy_that_blocks_the_host_behind_work_of_another_stream",
    "state pinned n",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state, pinned, n):
            current = torch.cuda.current_stream()
            v1 = buffer + buffer if n > 0 else buffer + buffer
            with torch.cuda.stream(s2):
                s2.wait_stream(current)
                v2 = pinned.to("cuda")
                with torch.cuda.stream(s1):
                    torch._dynamo.graph_break()
                    v3 = v2 + state
            current.wait_stream(s1)
            return v1, v2, v3

        return calls(k, fn, [buffer])
    """,
)
_add(
    "memory_that_lives_on_is_filled_beside_its_reader",
    "pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(pinned):
            v1 = pinned.to("cuda")
            with torch.cuda.stream(s1):
                v2 = v1 + buffer
                v1.zero_()
            return v1, v2

        return calls(k, fn, [buffer])  # unjoined
    """,
)
_add(
    "memory_that_lives_on_is_set_beside_its_reader",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            v1 = x + 1
            s1.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s1):
                v2 = v1 * y
                v1[:] = 0
                v3 = v1.view(16, 64)
            return v2, v3

        return calls(k, fn)  # unjoined
    """,
)
_add(
    "record_in_a_frame_that_computes_nothing",
    "x",
    """
    def build(k):
        s1 = k.stream()

        def fn(x):
            current = torch.cuda.current_stream()
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                done1 = torch.cuda.Event()
                done1.record()
            return x,

        return calls(k, fn)
    """,
)
_add(
    "host_computes_behind_a_synchronisation_with_what_an_earlier_frame_downloads",
    "y state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "sum_with_zeros_is_updated_behind_a_record",
    "x y pinned n",
    """
    def build(k):
        s1 = k.stream()
        e2 = torch.cuda.Event()
        w1 = weight(k)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, pinned, n):
            current = torch.cuda.current_stream()
            v1 = torch.zeros_like(buffer)
            v2 = v1 + y
            v3 = y.detach().amax(1, keepdim=True)
            torch._dynamo.graph_break()
            v4 = buffer.sum(1, keepdim=True)
            y[4:20].copy_(buffer[8:24])
            v5 = pinned.to("cuda", non_blocking=True)
            v6 = (sleep(v5) + v4).clamp(-2, 2)
            y.record_stream(s1)
            v7 = v6.detach().clone()
            for _ in range(n):
                v7 = v7.clamp(-2, 2) + 1
            v8 = x + 1
            v9 = torch.ones(32, 32, device="cuda")
            v10 = v9 @ w1
            e2.record(current)
            v2.add_(v9)
            return v7, v8, v9, v10

        return calls(k, fn, [buffer])
    """,
)
_add(
    "view_of_an_input_is_copied_beside_the_stream_that_updates_it",
    "y state pinned",
    """
    def build(k):
        s1 = k.stream()
        w1 = weight(k)
        buffer = k.parameter(32, 32)

        def fn(y, state, pinned):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "host_memory_is_written_back_before_a_synchronisation",
    "out",
    """
    def build(k):
        buffer = k.parameter(32, 32)

        def fn(out):
            current = torch.cuda.current_stream()
            v1 = buffer.to("cpu", non_blocking=True)
            out.copy_(buffer, non_blocking=True)
            current.synchronize()
            v2 = v1.to("cuda")
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "result_is_read_in_the_place_of_what_it_was_copied_to",
    "y pinned n",
    """
    def build(k):
        s1 = k.stream()

        def fn(y, pinned, n):
            current = torch.cuda.current_stream()
            v1 = pinned.to("cuda")
            y.copy_(v1)
            with torch.cuda.stream(s1):
                done1 = torch.cuda.Event()
                done1.record(current)
                s1.wait_event(done1)
                v2 = y + y if n > 0 else y * 2
            return v1, v2

        return calls(k, fn)  # unjoined
    """,
)
_add(
    "what_an_operator_wrote_is_read_on_another_stream",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state):
            current = torch.cuda.current_stream()
            add_to(x, buffer)
            x.clamp_(-2, 2)
            with torch.cuda.stream(s1):
                done1 = current.record_event()
                done1.wait()
                v1 = x + state
            return v1,

        return calls(k, fn, [buffer])  # unjoined
    """,
)
_add(
    "product_is_fused_with_what_stands_behind_a_record",
    "n",
    """
    def build(k):
        e2 = torch.cuda.Event()
        w0 = weight(k)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(n):
            v1 = sleep(buffer) @ w0
            v2 = torch.ones(32, 32, device="cuda")
            e2.record()
            v3 = v2 + v1 if n > 0 else v2 + v1
            v4 = v3 + v2
            v5 = v4 + v3
            return v2, v3, v4, v5

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_behind_a_synchronisation_of_what_was_downloaded",
    "y state",
    """
    def build(k):
        buffer = k.parameter(32, 32)

        def fn(y, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "no_op_of_what_is_written_back",
    "state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "view_of_an_upload_on_a_side_stream",
    "pinned ready",
    """
    def build(k):
        s1 = k.stream()

        def fn(pinned, ready):
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = pinned.to("cuda")
                v2 = v1.t()
            v3 = pinned.to("cuda", non_blocking=True)
            return v1, v2, v3

        return calls(k, fn)
    """,
)
_add(
    "upload_that_nobody_reads_blocks",
    "x y pinned",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, y, pinned):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s2):
                s2.wait_stream(current)
                v1 = pinned.to("cuda")
                done1 = s1.record_event()
                v1.copy_(x)
                v2 = x + y
                v3 = y @ v1.sign()
            current.wait_stream(s2)
            return v1, v2, v3

        return calls(k, fn)
    """,
)
_add(
    "download_of_a_constant_blocks",
    "x state ready",
    """
    def build(k):
        s1 = k.stream()
        s3 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state, ready):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "record_stream_of_an_input_that_was_updated",
    "x",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x):
            x[0].add_(1)
            x.clamp_(-2, 2)
            v1 = buffer.detach().amax(1, keepdim=True)
            x[1].record_stream(s1)
            v2 = v1 + buffer
            v3 = x + buffer
            v4 = x.view(32, 32)
            return v1, v2, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "record_stream_of_an_input_that_was_zeroed",
    "x",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x):
            x.zero_()
            x.record_stream(s1)
            v1 = x.view(32, 32)
            return v1, x + buffer

        return calls(k, fn, [buffer])
    """,
)
_add(
    "record_stream_before_the_last_update",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "record_stream_where_no_block_has_a_stream",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            v1 = x + y
            v1.record_stream(s1)
            v1.mul_(2)
            return v1, v1[1:]

        return calls(k, fn)
    """,
)
_add(
    "view_of_a_constant_that_was_computed",
    "y state ready n",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state, ready, n):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "update_on_another_stream_lives_on_behind_a_break",
    "x y state ready",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        e1 = torch.cuda.Event()

        def fn(x, y, state, ready):
            current = torch.cuda.current_stream()
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
            return v2, v3, v4, v5

        return calls(k, fn)
    """,
)
_add(
    "part_of_an_input_of_which_another_is_written",
    "x ready",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, ready):
            current = torch.cuda.current_stream()
            v1 = buffer + buffer
            with torch.cuda.stream(s1):
                ready.wait()
                x[4:20].copy_(buffer[8:24])
                v2 = x[3:4]
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "input_is_read_through_a_view_of_a_copy_of_it",
    "x y state pinned",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, state, pinned):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "copy_of_what_another_stream_reads",
    "y n",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(y, n):
            current = torch.cuda.current_stream()
            v1 = F.dropout(y, 0.5)
            with torch.cuda.stream(s2):
                v2 = v1.view(32, 32)
                with torch.cuda.stream(s1):
                    s1.wait_stream(current)
                    v3 = v1 + 1 if n > 0 else v1 * 2
                    v4 = (v1.sum(0, keepdim=True)).clamp(-2, 2)
                    v5 = sleep(buffer) * 3
                s2.wait_stream(current)
                v6 = v2.clone()
            return v3, v4, v5, v6

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_of_which_another_stream_reads_a_copy",
    "x pinned n",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, pinned, n):
            current = torch.cuda.current_stream()
            v1 = pinned.to("cuda")
            with torch.cuda.stream(s1):
                v2 = v1.detach().clone()
                for _ in range(n):
                    v2 = v2.clamp(-2, 2) + 1
                x[4:20].copy_(v1[8:24])
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "column_that_an_update_left_alone",
    "state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        e1 = torch.cuda.Event()
        buffer = k.parameter(32, 32)

        def fn(state):
            current = torch.cuda.current_stream()
            v1 = buffer + state
            v2 = v1[:, 5:6]
            with torch.cuda.stream(s2):
                e1.record(current)
                s2.wait_event(e1)
                v3 = torch.ones(32, 32, device="cuda")
                v4 = torch.where(buffer > 0, buffer, state)
                with torch.cuda.stream(s1):
                    e1.wait()
                    v1[:, ::2].add_(state[:, ::2])
            done1 = torch.cuda.Event()
            done1.record(s1)
            current.wait_event(done1)
            done2 = s2.record_event()
            done2.wait()
            return v1, v2, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "view_on_another_stream_is_memory_of_its_own",
    "x y state n",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, state, n):
            current = torch.cuda.current_stream()
            v1 = state.detach().amax(1, keepdim=True)
            v2 = state.t()
            v3 = x + y
            v4 = x.t().contiguous()
            v5 = buffer + state if n > 4 else buffer + state
            with torch.cuda.stream(s1):
                v6 = v4[:, ::2]
                s1.wait_stream(current)
                v7 = torch.zeros_like(v3)
                v8 = torch.where(v6 > 0, v6, v1)
            # unjoined
            return v5, v6, v7, v8

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_that_blocks_behind_an_update_of_a_buffer",
    "state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(state, pinned):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_that_blocks_in_a_frame_without_stream_operations",
    "x y state pinned n",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, state, pinned, n):
            current = torch.cuda.current_stream()
            y[:, ::2].add_(state[:, ::2])
            y.clamp_(-2, 2)
            v1 = x + buffer
            v2 = (buffer.sum()).clamp(-2, 2)
            v3 = pinned.to("cuda")
            torch._dynamo.graph_break()
            with torch.cuda.stream(s1):
                v4 = v1 * 2 if n > 2 else v1 + x
            done1 = torch.cuda.Event()
            done1.record(s1)
            current.wait_event(done1)
            return v1, v2, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "returned_view_of_a_part_of_a_concatenation",
    "y state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(y, state, pinned):
            current = torch.cuda.current_stream()
            v1 = buffer.clamp(-1, 1) * y
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v2 = buffer.cumsum(0)
            v3 = pinned.to("cuda", non_blocking=True)
            current.wait_stream(s1)
            v4 = torch.cat([v2, buffer])[16:48]
            v5 = double(state.detach())
            v6 = (sleep(v2) + state).clamp(-2, 2)
            v7 = v4.clamp(-1, 1) @ buffer.sign()
            v8 = v2[1:]
            return v5, v6, v7, v8

        return calls(k, fn, [buffer])
    """,
)
_add(
    "returned_view_behind_a_synchronization",
    "x y state ready",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, state, ready):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_that_blocks_behind_an_operator_that_writes_a_buffer",
    "state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state, pinned):
            current = torch.cuda.current_stream()
            add_to(buffer, state)
            buffer.clamp_(-2, 2)
            v1 = pinned.to("cuda")
            torch._dynamo.graph_break()
            with torch.cuda.stream(s1):
                v2 = buffer * 2
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "download_that_blocks_behind_an_operator_that_writes_a_buffer",
    "state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state):
            current = torch.cuda.current_stream()
            add_to(buffer, state)
            buffer.clamp_(-2, 2)
            v1 = buffer.cpu()
            torch._dynamo.graph_break()
            with torch.cuda.stream(s1):
                v2 = buffer * 2
            current.wait_stream(s1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "view_of_a_result_is_made_anew_behind_a_graph_break",
    "x y state ready n",
    """
    def build(k):
        s3 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, state, ready, n):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [], [buffer])
    """,
)
_add(
    "what_is_read_behind_a_synchronisation_of_the_device_may_be_of_an_earlier_frame",
    "x y n",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        sleep = k.sleep

        def fn(x, y, n):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "download_of_a_copy_that_is_left_out_behind_an_upload",
    "y state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state, pinned):
            current = torch.cuda.current_stream()
            v1 = buffer + state
            v2 = v1 + buffer
            with torch.cuda.stream(s1):
                v3 = torch.ones(32, 32, device="cuda")
            y.copy_(state)
            v4 = pinned.to("cuda")
            v5 = y.cpu()
            current.wait_stream(s1)
            return v1, v2, v3, v4, v5

        return calls(k, fn, [buffer])
    """,
)
_add(
    "download_that_blocks_between_two_updates_by_operators_and_a_matrix_product",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)

        def fn(x, y):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [w0], [buffer])
    """,
)
_add(
    "copy_that_another_stream_reads_instead_of_the_result",
    "x state pinned ready",
    """
    def build(k):
        s2 = k.stream()
        s3 = k.stream()
        sleep = k.sleep

        def fn(x, state, pinned, ready):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "promise_by_which_another_stream_comes_behind_a_reader_of_its_memory",
    "x y state ready",
    """
    def build(k):
        s2 = k.stream()
        s4 = k.stream()
        s5 = k.stream()

        def fn(x, y, state, ready):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "returned_view_behind_the_write_back_of_an_input",
    "x state",
    """
    def build(k):
        s3 = k.stream()
        e2 = torch.cuda.Event()
        buffer = k.parameter(32, 32)

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "returned_view_becomes_memory_of_its_own_and_its_base_is_given_back",
    "y state",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()
        buffer = k.parameter(32, 32)

        def fn(y, state):
            current = torch.cuda.current_stream()
            v1 = state + buffer
            v2 = state.t().contiguous()
            with torch.cuda.stream(s1):
                v3 = y.t()
                e1.record(current)
                s1.wait_event(e1)
                v4 = v3 + v2
                v5 = v2[1:]
            v6 = v1.clamp(-2, 2) + 1
            return v3, v4, v5, v6

        return calls(k, fn, [buffer])
    """,
)
_add(
    "input_that_was_copied_to_another_is_read_in_its_place_on_another_stream",
    "y state pinned",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        sleep = k.sleep

        def fn(y, state, pinned):
            current = torch.cuda.current_stream()
            v1 = state.view(32, 32)
            y[4:20].copy_(state[8:24])
            v2 = pinned.to("cuda", non_blocking=True)
            state.copy_(y)
            done1 = current.record_event()
            with torch.cuda.stream(s1):
                done1.wait()
                v5 = v2.clamp(-1, 1) @ v1.sign()
                with torch.cuda.stream(s2):
                    done2 = torch.cuda.Event()
                    done2.record(current)
                    s2.wait_event(done2)
                    v6 = sleep(y) + state
            done3 = torch.cuda.Event()
            done3.record(s1)
            current.wait_event(done3)
            current.wait_stream(s2)
            return v5, v6

        return calls(k, fn)
    """,
)
_add(
    "concatenation_behind_the_partitions_that_compute_its_parts",
    "y state",
    """
    def build(k):
        s1 = k.stream()
        e2 = torch.cuda.Event()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(y, state):
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

        return trains(k, fn, None, [w0], [buffer])
    """,
)
_add(
    "upload_that_is_returned_and_copied_to_another_result",
    "state pinned",
    """
    def build(k):
        s1 = k.stream()

        def fn(state, pinned):
            v3 = state.clone()
            v5 = v3.view(32, 32)
            v6 = pinned.to("cuda")
            with torch.cuda.stream(s1):
                v3.copy_(v6)
            done1 = s1.record_event()
            done1.wait()
            return v3, v5, v6

        return calls(k, fn)
    """,
)
_add(
    "gradient_that_is_computed_early_on_a_stream_that_is_joined",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        w1 = weight(k, True)

        def fn(x, state):
            current = torch.cuda.current_stream()
            v3 = state.relu()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v4 = v3 @ w1
                v6 = v4.detach().amax(1, keepdim=True)
                v8 = v3.clamp(-1, 1) @ v4.sign()
            current.wait_stream(s1)
            return v6, v8

        return trains(k, fn, 0, [w1])
    """,
)
_add(
    "record_stream_of_a_result_that_is_a_copy",
    "x y",
    """
    def build(k):
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y):
            y[4:20].copy_(buffer[8:24])
            v1 = y.clone()
            v2 = v1 + y
            v3 = buffer.clamp(-1, 1) * x
            v1.record_stream(s2)
            return v1, v2, v3

        return calls(k, fn, [buffer])
    """,
)
_add(
    "update_behind_a_synchronisation_that_nobody_joins",
    "state ready",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state, ready):
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = buffer + state
                torch.cuda.synchronize()
                buffer.add_(v1)
                buffer.clamp_(-2, 2)
            return (v1,)  # unjoined

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_that_another_stream_writes_to_an_input",
    "x y state pinned ready",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, y, state, pinned, ready):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = y + state
                v2 = pinned.to("cuda")
                with torch.cuda.stream(s2):
                    x.copy_(v2)
            current.wait_stream(s2)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "record_stream_of_an_upload_on_another_stream",
    "y state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state, pinned):
            v1 = buffer + state
            v2 = y.t()
            v3 = pinned.to("cuda", non_blocking=True)
            v4 = y.relu()
            with torch.cuda.stream(s1):
                v3.record_stream(s1)
            return v1, v2, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "rows_that_an_update_left_alone_read_by_a_stream_that_waited_before",
    "y ready",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, ready):
            y[4:20].copy_(buffer[8:24])
            v1 = y[3:4]
            s1.wait_event(ready)
            return (v1,)

        return calls(k, fn, [buffer])
    """,
)
_add(
    "columns_that_an_update_left_alone_awaited_by_an_event_of_an_earlier_frame",
    "state n",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        sleep = k.sleep

        def fn(state, n):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "update_of_a_result_of_an_earlier_frame_that_needs_a_gradient",
    "x y state ready",
    """
    def build(k):
        s1 = k.stream()
        w1 = weight(k, True)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, state, ready):
            with torch.cuda.stream(s1):
                ready.wait()
                v1 = state * 2
                v2 = sleep(y) @ w1
                torch._dynamo.graph_break()
                with torch.cuda.stream(s1):
                    v3 = torch.where(buffer > 0, buffer, state)
                    v2.mul_(2)
                    v4 = sleep(x) * 3
            done1 = s1.record_event()
            done1.wait()
            return v1, v2, v3, v4

        return trains(k, fn, 0, [w1], [buffer])
    """,
)
_add(
    "constant_that_is_copied_to_the_host_by_the_last_frame",
    "x y state ready",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        w1 = weight(k)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, state, ready):
            current = torch.cuda.current_stream()
            v3 = sleep(x) * 3
            current.wait_event(ready)
            v4 = buffer.t().contiguous()
            v5 = v4 @ w1
            v4.clamp_(-2, 2)
            with torch.cuda.stream(s1):
                done1 = current.record_event()
                done1.wait()
                v6 = v3.relu()
            done2 = s2.record_event()
            current.wait_stream(s1)
            v7 = int(v6.detach().amax().item())
            v8 = torch.full((32, 32), 1.0 if v7 > 0 else 0.0, device="cuda")
            v9 = v8.cpu()
            return v5, v6, v8, v9

        return calls(k, fn, [buffer])
    """,
)
_add(
    "upload_that_is_overwritten_before_a_graph_break",
    "x y state pinned",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        s3 = k.stream()
        e1 = torch.cuda.Event()
        w0 = weight(k)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, y, state, pinned):
            current = torch.cuda.current_stream()
            v1 = buffer.cpu()
            v2 = state * 2
            with torch.cuda.stream(s3):
                v3 = pinned.to("cuda")
                y.mul_(2)
                y.clamp_(-2, 2)
                v3.copy_(buffer)
                v4 = x.clamp(-1, 1) @ y.sign()
                v5 = sleep(buffer) * 3
                torch._dynamo.graph_break()
                with torch.cuda.stream(s1):
                    s1.wait_stream(current)
                    v6 = double(v2.detach())
                    e1.record(s3)
                    s1.wait_event(e1)
                    v7 = v5 @ w0
                    e1.record(s2)
            current.wait_stream(s1)
            return v1, v3, v4, v5, v6, v7

        return calls(k, fn, [buffer])
    """,
)
_add(
    "event_behind_an_update_of_an_earlier_result_that_needs_a_gradient",
    "x y state",
    """
    def build(k):
        s2 = k.stream()
        e1 = torch.cuda.Event()
        buffer = k.parameter(32, 32)

        def fn(x, y, state):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [], [buffer])
    """,
)
_add(
    "result_that_adds_nothing_on_two_streams",
    "",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn():
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "event_that_is_recorded_anew_behind_a_wait_for_an_earlier_frame",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        s3 = k.stream()
        e1 = torch.cuda.Event()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [w0], [buffer])
    """,
)
_add(
    "download_of_a_constant_in_a_frame_without_streams",
    "",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn():
            current = torch.cuda.current_stream()
            current.wait_stream(s1)
            torch._dynamo.graph_break()
            buffer.zero_()
            v1 = buffer.cpu()
            return (v1,)

        return calls(k, fn, [buffer])
    """,
)
_add(
    "record_stream_of_a_copy_that_another_stream_reads",
    "state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        s3 = k.stream()

        def fn(state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "record_stream_of_a_copy_ahead_of_a_record",
    "x",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()

        def fn(x):
            current = torch.cuda.current_stream()
            v1 = x.clone()
            e1.record(current)
            v2 = v1.clone()
            e1.record(current)
            v1.record_stream(s1)
            return (v2,)

        return calls(k, fn)
    """,
)
_add(
    "view_of_an_update_that_is_made_anew_behind_the_backward",
    "x state",
    """
    def build(k):
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)

        def fn(x, state):
            v1 = double(buffer.detach())
            v1.zero_()
            v2 = state.to("cpu", non_blocking=True)
            v3 = v1.view(16, 64)
            torch.cuda.synchronize()
            v4 = v2 + 1
            v5 = x @ w0
            return v2, v3, v4, v5

        return trains(k, fn, 0, [w0], [buffer])
    """,
)
_add(
    "copy_of_an_input_ahead_of_a_copy_that_blocks",
    "y state pinned",
    """
    def build(k):
        s2 = k.stream()
        s3 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, state, pinned):
            current = torch.cuda.current_stream()
            v1 = y * 2
            done1 = torch.cuda.Event()
            done1.record(s2)
            torch._dynamo.graph_break()
            s3.wait_stream(current)
            v2 = state.clone()
            v3 = pinned.to("cuda")
            v4 = buffer.clamp(-1, 1) @ v2.sign()
            return v1, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "record_stream_of_the_base_of_a_slice",
    "state",
    """
    def build(k):
        # unjoined
        s1 = k.stream()

        def fn(state):
            v1 = state.t() * 2
            v2 = v1[:, ::2]
            v1.record_stream(s1)
            return (v2,)

        return calls(k, fn)
    """,
)
_add(
    "part_of_a_concatenation_that_a_later_frame_reads_on_another_stream",
    "x y",
    """
    def build(k):
        # unjoined
        s2 = k.stream()
        s4 = k.stream()
        e1 = torch.cuda.Event()

        def fn(x, y):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "download_of_a_constant_that_is_returned",
    "x state ready",
    """
    def build(k):
        s1 = k.stream()
        s3 = k.stream()
        s4 = k.stream()
        w1 = weight(k)

        def fn(x, state, ready):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "part_of_a_concatenation_that_is_read_under_a_condition",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, state):
            v1 = buffer - x
            v2 = sleep(x) + state
            v3 = torch.cat([v2, v1 * 2])[16:48]
            with torch.cuda.stream(s1):
                v4 = buffer.view(32, 32)
            x[4:20].copy_(v2[8:24])
            x.clamp_(-2, 2)
            return v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "record_behind_what_the_host_computes",
    "x",
    """
    def build(k):
        s4 = k.stream()
        e2 = torch.cuda.Event()
        buffer = k.parameter(32, 32)

        def fn(x):
            v1 = x.cpu()
            v2 = int(buffer.detach().amax().item())
            v3 = torch.full((32, 32), 1.0 if v2 > 0 else 0.0, device="cuda")
            v4 = v1 * 2
            e2.record(s4)
            return v1, v3, v4

        return calls(k, fn, [buffer])
    """,
)
_add(
    "copy_into_an_input_of_what_dies_at_a_graph_break",
    "x pinned",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        s3 = k.stream()
        e2 = torch.cuda.Event()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)

        def fn(x, pinned):
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

        return trains(k, fn, 0, [w0], [buffer])
    """,
)
_add(
    "tensor_that_is_read_before_it_is_given_as_out",
    "x",
    """
    def build(k):
        s1 = k.stream()
        sleep = k.sleep

        def fn(x):
            current = torch.cuda.current_stream()
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                v1 = torch.full((32, 32), 1.0, device="cuda")
            v2 = torch.ones(32, 32, device="cuda")
            current.wait_stream(s1)
            v3 = sleep(v1) * 3
            torch.add(v1, v2, out=v1)
            return v1, v2, v3

        return calls(k, fn)
    """,
)
_add(
    "result_that_was_written_over_and_its_source_is_read_later",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        w0 = weight(k)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "copy_that_is_returned_and_its_source_is_read_behind_a_copy_that_blocks",
    "y state pinned ready n",
    """
    def build(k):
        s4 = k.stream()
        s5 = k.stream()
        w1 = weight(k)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(y, state, pinned, ready, n):
            current = torch.cuda.current_stream()
            v1 = sleep(y) @ w1
            with torch.cuda.stream(s4):
                s4.wait_event(ready)
                v2 = state.detach().clone()
                for _ in range(n):
                    v2 = v2.clamp(-2, 2) + 1
                done1 = current.record_event()
                with torch.cuda.stream(s5):
                    v3 = y[:, 1:]
                    done1.wait()
                    v4 = v1.clone()
                    v5 = pinned.to("cuda")
                    v6 = sleep(v1) + v5
            current.wait_stream(s4)
            done2 = s5.record_event()
            done2.wait()
            return v3, v4, v5, v6

        return calls(k, fn, [buffer])
    """,
)
_add(
    "download_of_a_scanned_constant",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        w0 = weight(k, True)

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [w0], [])
    """,
)
_add(
    "mask_for_the_backward_of_an_input_behind_a_copy_that_blocks",
    "x state pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state, pinned):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [], [buffer])
    """,
)
_add(
    "copy_of_an_updated_input_whose_source_is_returned",
    "y pinned",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y, pinned):
            current = torch.cuda.current_stream()
            v1 = pinned.to("cuda")
            with torch.cuda.stream(s1):
                y.copy_(v1)
            current.wait_stream(s1)
            buffer.copy_(y)
            return (v1,)

        return calls(k, fn, [buffer])
    """,
)
_add(
    "concatenation_whose_memory_is_taken_behind_a_record",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        e2 = torch.cuda.Event()
        sleep = k.sleep

        def fn(x, y):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "update_of_another_streams_value_read_on_a_stream_of_a_block_around_a_graph_break",
    "y state ready",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(y, state, ready):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "row_that_an_update_left_alone_which_the_host_had_waited_for",
    "x y",
    """
    def build(k):
        s3 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
            y.relu_()
            with torch.cuda.stream(s3):
                done1 = torch.cuda.Event()
                done1.record(current)
                done1.synchronize()
                y[4:20].copy_(x[8:24])
                v1 = y[3:4]
            return (v1,)

        return calls(k, fn)
    """,
)
_add(
    "download_of_a_constant_at_the_end_behind_a_graph_break",
    "x y ready",
    """
    def build(k):
        s1 = k.stream()
        s3 = k.stream()

        def fn(x, y, ready):
            with torch.cuda.stream(s1):
                ready.wait()
                with torch.cuda.stream(s3):
                    s3.wait_event(ready)
                    v1 = int(y.detach().amax().item())
                    v2 = torch.full((32, 32), 1.0 if v1 > 0 else 0.0, device="cuda")
                    v3 = x.sum(0, keepdim=True)
                    v4 = v2.cpu()
            return v3, v4

        return calls(k, fn)
    """,
)
_add(
    "copy_that_blocks_and_nobody_reads_at_the_end_behind_a_graph_break",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
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

        return calls(k, fn)
    """,
)
_add(
    "result_that_is_copied_and_the_copy_is_read_behind_a_wait",
    "y",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        s3 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(y):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "columns_of_a_result_that_a_saved_value_is_taken_from",
    "state ready",
    """
    def build(k):
        s2 = k.stream()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(state, ready):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, None, [w0], [buffer])
    """,
)
_add(
    "row_that_an_update_left_alone_which_the_host_had_waited_for_in_training",
    "x y",
    """
    def build(k):
        s3 = k.stream()
        w0 = weight(k, True)

        def fn(x, y):
            current = torch.cuda.current_stream()
            v1 = y @ w0
            v2 = v1 * 2
            v3 = v1 + x
            with torch.cuda.stream(s3):
                done1 = torch.cuda.Event()
                done1.record(current)
                done1.synchronize()
                v2[4:20].copy_(x[8:24])
                v4 = v2[3:4]
            return v3, v4

        return trains(k, fn, 0, [w0], [])
    """,
)
_add(
    "input_that_is_updated_behind_a_mask",
    "state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(state):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                buffer[buffer > 0] = 1
            current.wait_stream(s1)
            v1 = buffer + state
            return v1,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "list_of_tensors_that_another_stream_updates",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
            v1 = x * 2
            v2 = y * 3
            v3 = v2.view(64, 16)
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                torch._foreach_add_([v1, v3], 1)
            current.wait_stream(s1)
            return v1, v3

        return calls(k, fn)
    """,
)
_add(
    "copy_of_an_input_that_is_updated_in_part_and_read_behind_what_another_stream_waits_for",
    "x state",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, state):
            current = torch.cuda.current_stream()
            v1 = x * 3
            state[4:20].copy_(x[8:24])
            v1.copy_(state)
            s1.wait_stream(current)
            v2 = v1.sum(0, keepdim=True)
            return v2,

        return calls(k, fn)
    """,
)
_add(
    "input_that_is_updated_before_an_event_and_recorded_on_a_stream_behind_it",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()

        def fn(x, state):
            current = torch.cuda.current_stream()
            state.copy_(x)
            e1.record(current)
            state.record_stream(s1)
            v1 = x + 1
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "record_stream_of_a_copy_to_the_type_that_there_is",
    "x",
    """
    def build(k):
        s1 = k.stream()

        def fn(x):
            v1 = x.to(torch.float32, copy=True)
            v1.record_stream(s1)
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "record_stream_of_what_is_converted_there_and_back",
    "x",
    """
    def build(k):
        s1 = k.stream()

        def fn(x):
            v1 = x.double().float()
            v1.record_stream(s1)
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "parts_of_a_recorded_tensor_that_a_copy_of_a_list_fills",
    "x pinned",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, pinned):
            v1 = x + 1
            v1.record_stream(s1)
            v2 = v1 * 2
            torch._foreach_copy_([v1[2:4], v1[8:20]], [pinned[6:8], pinned[12:24]], non_blocking=True)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "recorded_tensor_that_a_copy_of_a_list_fills",
    "x pinned",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, pinned):
            v1 = x + 1
            v1.record_stream(s1)
            v2 = v1 * 2
            torch._foreach_copy_([v1], [pinned], non_blocking=True)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "list_of_recorded_tensors_that_is_interpolated_from_its_other_end",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            v1 = x + 1
            v2 = y * 2
            v1.record_stream(s1)
            torch._foreach_lerp_([v2, v1], [y, x], 0.7)
            v2.record_stream(s1)
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "tensor_that_is_recorded_after_a_list_with_an_input_in_it_is_updated",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            v1 = x + 1
            torch._foreach_mul_([v1, y], [x, x])
            v1.record_stream(s1)
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "recorded_tensor_that_is_an_input_with_other_rows",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            v1 = torch.slice_scatter(x, y[:2], 0, 2, 4)
            v1.record_stream(s1)
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "host_memory_that_is_filled_and_uploaded_and_filled_again",
    "x y out",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y, out):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                out.copy_(x, non_blocking=True)
                y.copy_(out, non_blocking=True)
                v1 = y * 2
                out.copy_(v1, non_blocking=True)
                y.copy_(out, non_blocking=True)
            current.wait_stream(s1)
            return v1,

        return calls(k, fn)
    """,
)
_add(
    "host_memory_that_a_constant_overwrites_before_anybody_reads_it",
    "x y out",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y, out):
            current = torch.cuda.current_stream()
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
            return v2,

        return calls(k, fn)
    """,
)
_add(
    "copy_of_an_input_that_an_update_of_a_list_changes",
    "x",
    """
    def build(k):
        s1 = k.stream()

        def fn(x):
            torch._foreach_mul_([x], 2)
            v1 = x.clone()
            s1.wait_stream(torch.cuda.current_stream())
            torch._dynamo.graph_break()
            v2 = x + 1
            return v1, v2

        return calls(k, fn)
    """,
)
_add(
    "noise_of_the_layout_of_an_input_that_nobody_has_waited_for",
    "y state",
    """
    def build(k):
        s1 = k.stream()

        def fn(y, state):
            y.record_stream(torch.cuda.current_stream())
            v1 = torch.randn_like(state)
            return v1,

        return calls(k, fn, loads=(s1, [0, 1]))
    """,
)
_add(
    "leaf_that_a_side_stream_reads_first_and_for_nothing",
    "x",
    """
    def build(k):
        s1 = k.stream()
        w0 = weight(k, True)

        def fn(x):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                v1 = x.t()
                s1.wait_stream(current)
                v2 = torch.ones(32, 32, device="cuda")
            current.wait_stream(s1)
            v3 = x @ w0
            return v2, v3

        return trains(k, fn, 0, [w0], loads=(s1, [0]))
    """,
)
_add(
    "input_from_which_the_backward_computes_again",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, y):
            with torch.cuda.stream(s2):
                s2.wait_stream(torch.cuda.current_stream())
                s2.wait_stream(s1)
                v1 = y.clamp(-1, 1) * x
                s1.wait_stream(s2)
            torch.cuda.current_stream().wait_stream(s1)
            return v1,

        return trains(k, fn, 0, [], loads=(s1, [0, 1]))
    """,
)
_add(
    "returned_views_of_a_leaf_on_two_side_streams",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [])
    """,
)
_add(
    "returned_view_of_a_result_on_a_side_stream",
    "x state",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, state):
            current = torch.cuda.current_stream()
            v1 = state * x
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v2 = v1.t()
                v3 = state * 2
            current.wait_stream(s1)
            v4 = v3 @ state
            return v1, v2, v4

        return trains(k, fn, 0, [])
    """,
)
_add(
    "updated_part_of_a_concatenation_that_a_later_partition_reads",
    "x y out",
    """
    def build(k):
        s3 = k.stream()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)

        def fn(x, y, out):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [w0], [buffer])
    """,
)
_add(
    "memory_that_a_side_stream_fills_for_a_later_frame",
    "x",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x):
            current = torch.cuda.current_stream()
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "view_of_a_leaf_on_a_side_stream_after_a_read_on_the_callers",
    "x state",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, state):
            current = torch.cuda.current_stream()
            v1 = x.sigmoid()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v2 = state * 2
                v3 = x.squeeze()
            current.wait_stream(s1)
            return v2, v3

        return trains(k, fn, 0, [])
    """,
)
_add(
    "part_of_an_input_that_is_updated_while_others_read_the_rest",
    "x",
    """
    def build(k):
        s1 = k.stream()
        s2 = k.stream()

        def fn(x):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v1 = x * 2
                v2 = v1[3:4]
                with torch.cuda.stream(s2):
                    torch._dynamo.graph_break()
                    s2.wait_stream(s1)
                    v1[0, 0].sub_(x[1, 1]).mul_(2)
            current.wait_stream(s2)
            return v2,

        return calls(k, fn)
    """,
)
_add(
    "constant_that_the_host_writes_beside_a_copy_in_a_frame_without_streams",
    "x y state out n",
    """
    def build(k):
        s1 = k.stream()
        s4 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, state, out, n):
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

        return calls(k, fn, [buffer])
    """,
)
_add(
    "new_value_of_an_input_that_goes_to_the_host_too",
    "x y out",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y, out):
            buffer.clamp_(-2, 2)
            y[2:4].copy_(out[6:8], non_blocking=True)
            out.copy_(buffer, non_blocking=True)
            v1 = buffer + y
            buffer.record_stream(s1)
            return v1,

        return calls(k, fn, [buffer])
    """,
)
_add(
    "copies_of_one_value_on_two_streams",
    "x",
    """
    def build(k):
        s1 = k.stream()

        def fn(x):
            current = torch.cuda.current_stream()
            v1 = x @ x
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v2 = v1.t().clone()  # unjoined
            v3 = v1.clone()
            return v2, v3

        return calls(k, fn)
    """,
)
_add(
    "view_that_is_an_operator_call_launches_nothing",
    "x y",
    """
    def build(k):
        s1 = k.stream()

        def fn(x, y):
            current = torch.cuda.current_stream()
            v1 = torch.complex(x, y)
            v2 = x @ y
            v3 = torch.view_as_real(v1)[..., 0]
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v4 = v2 @ v2
            current.wait_stream(s1)
            return v3, v4

        return calls(k, fn)
    """,
)
_add(
    "saved_view_of_what_is_computed_after_the_host_waited",
    "y",
    """
    def build(k):
        s1 = k.stream()
        w0 = weight(k, True)
        buffer = k.parameter(32, 32)
        sleep = k.sleep

        def fn(y):
            v1 = torch.empty(32, 32, pin_memory=True)
            v1.copy_(buffer, non_blocking=True)
            torch.cuda.synchronize()
            v2 = sleep(y) @ w0
            return v1, v2

        return trains(k, fn, None, [w0], [buffer], loads=(s1, [0]))
    """,
)
_add(
    "update_behind_a_mask_of_a_result_of_a_list",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, y):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(s1):
                done1 = current.record_event()
                done1.wait()
                v1 = torch._foreach_mul([buffer, y], 2)[1]
            v2 = x * 2
            current.wait_stream(s1)
            v1.masked_fill_(v1 > 0, 1)
            return v1, v2

        return calls(k, fn, [buffer])
    """,
)
_add(
    "gradient_that_is_a_view_by_an_operator_call",
    "x state",
    """
    def build(k):
        s1 = k.stream()
        buffer = k.parameter(32, 32)

        def fn(x, state):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [], [buffer])
    """,
)
_add(
    "input_that_only_the_compiled_backward_reads_after_the_host_waited",
    "x y",
    """
    def build(k):
        s1 = k.stream()
        e1 = torch.cuda.Event()

        def fn(x, y):
            current = torch.cuda.current_stream()
            e1.record(s1)
            current.wait_event(e1)
            v1 = y.clamp(-1, 1) * x
            v2 = int(v1.detach().amax().item())
            v3 = torch.full((32, 32), 1.0 if v2 > 0 else 0.0, device="cuda")
            return v1, v3

        return trains(k, fn, 0, [], loads=(s1, [0, 1]))
    """,
)
_add(
    "wait_of_a_backward_for_what_the_engine_has_ordered",
    "x y state",
    """
    def build(k):
        s1 = k.stream()
        w1 = weight(k, True)

        def fn(x, y, state):
            current = torch.cuda.current_stream()
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

        return trains(k, fn, 0, [w1])
    """,
)
