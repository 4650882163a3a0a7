"""View of a constant that was computed."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state ready n"


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
