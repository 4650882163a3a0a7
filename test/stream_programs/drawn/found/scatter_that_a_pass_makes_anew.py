"""Scatter that a pass makes anew."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y):
        current = torch.cuda.current_stream()
        v1 = y * 2
        v2 = v1 + buffer
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1[4:20].copy_(v2[8:24])
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn, [buffer])
