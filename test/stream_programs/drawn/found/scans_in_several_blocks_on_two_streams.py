"""Scans in several blocks on two streams: the blocks of each hand their sums on in a workspace."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1 = x.repeat(64, 1).flatten().cumsum(0)
        v2 = y.repeat(64, 1).flatten().cumsum(0)
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn)
