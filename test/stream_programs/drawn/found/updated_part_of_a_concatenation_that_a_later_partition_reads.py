"""Updated part of a concatenation that a later partition reads."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x y out"


def build(k):
    s3 = k.stream()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)

    def fn(x, y, out):
        current = torch.cuda.current_stream()
        buffer[4:20].copy_(out[8:24], non_blocking=True)
        buffer[torch.arange(0, 2, device="cuda") * 0] = 1
        v1 = torch.empty(32, 32, pin_memory=True)
        v1.copy_(y, non_blocking=True)
        with torch.cuda.stream(s3):
            done1 = current.record_event()
            done1.wait()
            v2 = torch.stack([buffer, y]).sum(0)
            v3 = torch.empty(32, 32, pin_memory=True)
            v3.copy_(y, non_blocking=True)
            torch.cuda.synchronize()
            v4 = v1.clamp(-1, 1)
        v5 = x @ w0
        return v1, v2, v3, v4, v5

    return trains(k, fn, 0, [w0], [buffer])
