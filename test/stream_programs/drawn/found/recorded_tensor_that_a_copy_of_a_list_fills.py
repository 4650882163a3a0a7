"""Recorded tensor that a copy of a list fills."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x pinned"


def build(k):
    s1 = k.stream()

    def fn(x, pinned):
        v1 = x + 1
        v1.record_stream(s1)
        v2 = v1 * 2
        torch._foreach_copy_([v1], [pinned], non_blocking=True)
        return v1, v2

    return calls(k, fn)
