"""Host memory that is read behind an event's synchronisation, and a copy behind it of what a blocking copy had made."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x pinned"


def build(k):
    e1 = torch.cuda.Event()

    def fn(x, pinned):
        v1 = pinned.to("cuda")
        v2 = torch.zeros(32, 32, pin_memory=True)
        v2[4:20].copy_(v1[8:24], non_blocking=True)
        v3 = x.t().contiguous()
        e1.record()
        e1.synchronize()
        v4 = v2 + 1
        v5 = torch.zeros(32, 32, pin_memory=True)
        v5[4:20].copy_(v1[8:24], non_blocking=True)
        return v1, v2, v3, v4, v5

    return calls(k, fn)
