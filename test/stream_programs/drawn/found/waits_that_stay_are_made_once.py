"""Waits that stay are made once."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()

    def fn(x):
        s1.wait_stream(torch.cuda.current_stream())
        return (x,)

    return calls(k, fn)
