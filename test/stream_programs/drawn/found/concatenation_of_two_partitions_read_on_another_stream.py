"""Concatenation of two partitions read on another stream."""

from stream_programs.drawn.kit import add_to, calls, F, torch


INPUTS = "x y state n"


def build(k):
    s2 = k.stream()
    e2 = torch.cuda.Event()
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, y, state, n):
        current = torch.cuda.current_stream()
        torch.cuda.synchronize()
        v1 = x.cpu()
        s2.synchronize()
        v2 = state.detach().clone()
        for _ in range(n):
            v2 = v2.clamp(-2, 2) + 1
        v2.add_(y)
        v3 = y.clone()
        x.record_stream(s2)
        v4 = sleep(buffer) * 3
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v5 = v3.t().contiguous()
            v6 = torch.cat([v4, v2])[16:48]
            v7 = v1.clamp(-1, 1)
            add_to(v5, x)
            v8 = v5[3:4]
            v9 = F.dropout(v3, 0.5)
        e2.record(s2)
        e2.wait()
        return v1, v6, v7, v8, v9

    return calls(k, fn, [buffer])
