"""Mask for the backward of an input after a copy that blocks."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state, pinned):
        current = torch.cuda.current_stream()
        buffer.mul_(2)
        v1 = x[:, 5:6]
        v2 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            v3 = state.cpu()
            v4 = v1.clamp(-1, 1) * buffer
            v5 = v4.detach().cumsum(0)
            v6 = pinned.to("cuda")
            v7 = state.sum(0, keepdim=True)
            state[1:9] = 3
            v8 = v6.t().clone(memory_format=torch.contiguous_format)
        current.wait_stream(s1)
        return v4, v2, v3, v5, v7, v8

    return trains(k, fn, 0, [], [buffer])
