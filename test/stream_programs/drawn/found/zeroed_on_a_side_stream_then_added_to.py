"""Zeroed on a side stream then added to."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state ready"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state, ready):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            buffer.zero_()
        current.wait_stream(s1)
        buffer[:, ::2].add_(state[:, ::2])
        return (x,)

    return calls(k, fn, [buffer])
