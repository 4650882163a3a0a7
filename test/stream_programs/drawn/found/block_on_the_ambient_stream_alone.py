"""Block on the caller's stream alone."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x pinned"


def build(k):
    w0 = weight(k, True)

    def fn(x, pinned):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(current):
            v1 = pinned.to("cuda")
        v2 = x @ w0
        return v1, v2

    return trains(k, fn, 0, [w0])
