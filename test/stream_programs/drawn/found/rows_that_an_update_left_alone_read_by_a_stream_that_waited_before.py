"""Rows that an update left alone read by a stream that waited before."""

from stream_programs.drawn.kit import calls


INPUTS = "y ready"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, ready):
        y[4:20].copy_(buffer[8:24])
        v1 = y[3:4]
        s1.wait_event(ready)
        return (v1,)

    return calls(k, fn, [buffer])
