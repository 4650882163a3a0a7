"""Download of a scanned constant."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    w0 = weight(k, True)

    def fn(x, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v1 = state @ w0
            v2 = torch.zeros_like(state)
            with torch.cuda.stream(s1):
                s1.wait_stream(s2)
                v3 = v2.cumsum(0)
                v2[1:9] = 3
                v2[4:20].copy_(x[8:24])
                s2.wait_stream(s1)
                v4 = v3.to("cpu", non_blocking=True)
        current.wait_stream(s1)
        return v1, v3, v4

    return trains(k, fn, 0, [w0], [])
