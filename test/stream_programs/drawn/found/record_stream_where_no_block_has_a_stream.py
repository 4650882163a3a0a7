"""Record stream where no block has a stream."""

from stream_programs.drawn.kit import calls


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        v1 = x + y
        v1.record_stream(s1)
        v1.mul_(2)
        return v1, v1[1:]

    return calls(k, fn)
