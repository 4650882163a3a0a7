"""Gradient that is computed early on a stream that is joined."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    w1 = weight(k, True)

    def fn(x, state):
        current = torch.cuda.current_stream()
        v3 = state.relu()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v4 = v3 @ w1
            v6 = v4.detach().amax(1, keepdim=True)
            v8 = v3.clamp(-1, 1) @ v4.sign()
        current.wait_stream(s1)
        return v6, v8

    return trains(k, fn, 0, [w1])
