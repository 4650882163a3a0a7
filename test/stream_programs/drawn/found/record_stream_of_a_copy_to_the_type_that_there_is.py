"""Record stream of a copy to the type that there is."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()

    def fn(x):
        v1 = x.to(torch.float32, copy=True)
        v1.record_stream(s1)
        return (v1,)

    return calls(k, fn)
