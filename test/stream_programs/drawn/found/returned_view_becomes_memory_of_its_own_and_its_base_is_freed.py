"""Returned view becomes memory of its own and its base is freed."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state"


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

    return calls(k, fn, [buffer])  # unjoined
