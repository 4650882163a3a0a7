"""Copy that blocks the host orders a stream that is only synchronized."""

from stream_programs.drawn.kit import calls


INPUTS = "x state pinned"


def build(k):
    s1 = k.stream()

    def fn(x, state, pinned):
        s1.synchronize()
        v1 = state + x
        v2 = pinned.to("cuda")
        v3 = v2 + x
        return v1, v2, v3

    return calls(k, fn)
