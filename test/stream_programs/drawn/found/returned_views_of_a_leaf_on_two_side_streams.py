"""Returned views of a leaf on two side streams."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x state"


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
