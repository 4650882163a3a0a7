"""Work after a copy that blocks the host."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state, pinned):
        current = torch.cuda.current_stream()
        buffer.copy_(state)
        v1 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            v2 = x + buffer
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn, [buffer])
