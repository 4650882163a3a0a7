"""Product is fused with what stands after a record."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "n"


def build(k):
    e2 = torch.cuda.Event()
    w0 = weight(k)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(n):
        v1 = sleep(buffer) @ w0
        v2 = torch.ones(32, 32, device="cuda")
        e2.record()
        v3 = v2 + v1 if n > 0 else v2 + v1
        v4 = v3 + v2
        v5 = v4 + v3
        return v2, v3, v4, v5

    return calls(k, fn, [buffer])
