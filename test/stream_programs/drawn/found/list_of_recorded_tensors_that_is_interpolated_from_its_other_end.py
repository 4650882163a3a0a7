"""List of recorded tensors that is interpolated from its other end."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        v1 = x + 1
        v2 = y * 2
        v1.record_stream(s1)
        torch._foreach_lerp_([v2, v1], [y, x], 0.7)
        v2.record_stream(s1)
        return v1, v2

    return calls(k, fn)
