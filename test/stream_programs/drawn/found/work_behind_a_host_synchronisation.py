"""Work after a host synchronisation."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x y state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y, state):
        current = torch.cuda.current_stream()
        v1 = (x.sum()).clamp(-2, 2)
        current.synchronize()
        with torch.cuda.stream(s1):
            v2 = (state > 0).float()
            v3 = v2 + state
            buffer.add_(y)
            buffer.clamp_(-2, 2)
        current.wait_stream(s1)
        return v1, v2, v3

    return trains(k, fn, 0, [], [buffer])
