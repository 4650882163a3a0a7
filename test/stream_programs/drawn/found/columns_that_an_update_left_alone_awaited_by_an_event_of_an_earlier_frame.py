"""Columns that an update left alone awaited by an event of an earlier frame."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state n"


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
