"""Host waits for a copy that pageable memory ends: what the code can't count on makes no wait of its own needless."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x out"


def build(k):
    buffer = k.parameter(32, 32)

    def fn(x, out):
        done1 = torch.cuda.Event()
        done1.record()
        torch._foreach_copy_([x[2:4], x[8:20]], [out[6:8], out[12:24]], non_blocking=True)
        out[3].copy_(buffer[5], non_blocking=True)
        v1 = torch.zeros(32, 32, pin_memory=True)
        v1[4:20].copy_(x[8:24], non_blocking=True)
        return (v1,)

    return calls(k, fn, [buffer])
