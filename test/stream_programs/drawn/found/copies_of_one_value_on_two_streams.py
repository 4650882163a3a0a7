"""Copies of one value on two streams."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


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
