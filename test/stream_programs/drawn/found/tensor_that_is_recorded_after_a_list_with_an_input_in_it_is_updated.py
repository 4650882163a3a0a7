"""Tensor that is recorded after a list with an input in it is updated."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        v1 = x + 1
        torch._foreach_mul_([v1, y], [x, x])
        v1.record_stream(s1)
        return (v1,)

    return calls(k, fn)
