"""Memory that lives on is set beside its reader."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        v1 = x + 1
        s1.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s1):
            v2 = v1 * y
            v1[:] = 0
            v3 = v1.view(16, 64)
        return v2, v3

    return calls(k, fn)  # unjoined
