"""Part of an input of which another is written."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x ready"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, ready):
        current = torch.cuda.current_stream()
        v1 = buffer + buffer
        with torch.cuda.stream(s1):
            ready.wait()
            x[4:20].copy_(buffer[8:24])
            v2 = x[3:4]
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn, [buffer])
