"""Slices of a returned concatenation on two streams."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state"


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
