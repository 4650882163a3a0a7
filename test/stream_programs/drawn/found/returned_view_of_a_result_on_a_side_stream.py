"""Returned view of a result on a side stream."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x state"


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
