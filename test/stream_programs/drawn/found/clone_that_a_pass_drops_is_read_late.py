"""Clone that a pass drops is read late."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x):
        current = torch.cuda.current_stream()
        v1 = buffer.clone()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v2 = x * 2
        v3 = x @ v1.sign()
        current.wait_stream(s1)
        return v2, v3

    return calls(k, fn, [buffer])
