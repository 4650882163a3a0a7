"""Side view of a leaf that a view without users reads first."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state, pinned):
        current = torch.cuda.current_stream()
        v1 = buffer + state
        v2 = x[:, 5:6]
        v3 = pinned.to("cuda", non_blocking=True)
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v4 = buffer * 2
            v5 = torch.empty(32, 32, pin_memory=True)
            v5.copy_(x.detach(), non_blocking=True)
            v6 = x[3:4]
        current.wait_stream(s1)
        return v3, v4, v5, v6

    return trains(k, fn, 0, [], [buffer])
