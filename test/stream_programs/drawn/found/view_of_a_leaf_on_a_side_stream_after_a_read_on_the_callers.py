"""View of a leaf on a side stream after a read on the callers."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x state"


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
