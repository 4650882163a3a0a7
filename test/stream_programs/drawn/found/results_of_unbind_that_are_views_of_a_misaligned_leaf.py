"""Results of unbind that are views of a misaligned leaf."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x):
        current = torch.cuda.current_stream()
        current.wait_stream(s1)
        buffer.add_(x.detach())
        buffer.clamp_(-2, 2)
        v1 = x.unbind(0)[1:4]
        with torch.cuda.stream(s1):
            v2 = torch.ones(32, 32, device="cuda")
        current.wait_stream(s1)
        return v1, v2

    return trains(k, fn, 0, [], [buffer], loads=(s1, [0]))
