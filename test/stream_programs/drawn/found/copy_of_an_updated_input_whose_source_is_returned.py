"""Copy of an updated input whose source is returned."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, pinned):
        current = torch.cuda.current_stream()
        v1 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            y.copy_(v1)
        current.wait_stream(s1)
        buffer.copy_(y)
        return (v1,)

    return calls(k, fn, [buffer])
