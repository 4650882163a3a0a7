"""Returned view of a part of a concatenation."""

from stream_programs.drawn.kit import calls, double, torch


INPUTS = "y state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(y, state, pinned):
        current = torch.cuda.current_stream()
        v1 = buffer.clamp(-1, 1) * y
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v2 = buffer.cumsum(0)
        v3 = pinned.to("cuda", non_blocking=True)
        current.wait_stream(s1)
        v4 = torch.cat([v2, buffer])[16:48]
        v5 = double(state.detach())
        v6 = (sleep(v2) + state).clamp(-2, 2)
        v7 = v4.clamp(-1, 1) @ buffer.sign()
        v8 = v2[1:]
        return v5, v6, v7, v8

    return calls(k, fn, [buffer])
