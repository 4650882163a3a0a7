"""Update after a synchronisation that nobody joins."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state ready"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state, ready):
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v1 = buffer + state
            torch.cuda.synchronize()
            buffer.add_(v1)
            buffer.clamp_(-2, 2)
        return (v1,)  # unjoined

    return calls(k, fn, [buffer])
