"""Record stream of an upload on another stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, state, pinned):
        v1 = buffer + state
        v2 = y.t()
        v3 = pinned.to("cuda", non_blocking=True)
        v4 = y.relu()
        with torch.cuda.stream(s1):
            v3.record_stream(s1)
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
