"""View of an update that is made anew after the backward."""

from stream_programs.drawn.kit import double, torch, trains, weight


INPUTS = "x state"


def build(k):
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)

    def fn(x, state):
        v1 = double(buffer.detach())
        v1.zero_()
        v2 = state.to("cpu", non_blocking=True)
        v3 = v1.view(16, 64)
        torch.cuda.synchronize()
        v4 = v2 + 1
        v5 = x @ w0
        return v2, v3, v4, v5

    return trains(k, fn, 0, [w0], [buffer])
