"""Leaf that a side stream reads first and for nothing."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x"


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
