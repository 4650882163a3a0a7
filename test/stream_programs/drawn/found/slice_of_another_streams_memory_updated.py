"""Slice of another streams memory updated."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1 = x + y
        s2.wait_stream(s1)
        with torch.cuda.stream(s2):
            v1[4:20].copy_(y[8:24])
        current.wait_stream(s1)
        current.wait_stream(s2)
        return (v1,)

    return calls(k, fn)
