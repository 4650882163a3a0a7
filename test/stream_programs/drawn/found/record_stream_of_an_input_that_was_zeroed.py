"""Record stream of an input that was zeroed."""

from stream_programs.drawn.kit import calls


INPUTS = "x"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x):
        x.zero_()
        x.record_stream(s1)
        v1 = x.view(32, 32)
        return v1, x + buffer

    return calls(k, fn, [buffer])
