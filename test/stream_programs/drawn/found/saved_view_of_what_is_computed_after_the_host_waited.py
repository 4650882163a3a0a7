"""Saved view of what is computed after the host waited."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "y"


def build(k):
    s1 = k.stream()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(y):
        v1 = torch.empty(32, 32, pin_memory=True)
        v1.copy_(buffer, non_blocking=True)
        torch.cuda.synchronize()
        v2 = sleep(y) @ w0
        return v1, v2

    return trains(k, fn, None, [w0], [buffer], loads=(s1, [0]))
