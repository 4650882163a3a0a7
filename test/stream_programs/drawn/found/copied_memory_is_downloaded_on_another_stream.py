"""Copied memory is downloaded on another stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state out ready"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state, out, ready):
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v1 = buffer + state
            state.copy_(buffer)
        done1 = s1.record_event()
        done1.wait()
        v2 = state + x
        out.copy_(state, non_blocking=True)
        return v1, v2

    return calls(k, fn, [buffer])
