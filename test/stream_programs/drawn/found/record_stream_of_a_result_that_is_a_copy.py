"""Record stream of a result that is a copy."""

from stream_programs.drawn.kit import calls


INPUTS = "x y"


def build(k):
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y):
        y[4:20].copy_(buffer[8:24])
        v1 = y.clone()
        v2 = v1 + y
        v3 = buffer.clamp(-1, 1) * x
        v1.record_stream(s2)
        return v1, v2, v3

    return calls(k, fn, [buffer])
