"""Recorded tensor that is an input with other rows."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        v1 = torch.slice_scatter(x, y[:2], 0, 2, 4)
        v1.record_stream(s1)
        return (v1,)

    return calls(k, fn)
