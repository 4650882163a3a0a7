"""Promised value absorbed before the record."""

from stream_programs.drawn.kit import add_to, torch, trains, weight


INPUTS = "y state"


def build(k):
    s1 = k.stream()
    e1 = torch.cuda.Event()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(y, state):
        current = torch.cuda.current_stream()
        v1 = torch.where(buffer > 0, buffer, state)
        v2 = v1 + state
        s1.wait_stream(current)
        v3 = y * 2
        v2.mul_(2)
        e1.record(s1)
        add_to(v3, v2)
        return (sleep(v3) @ w0,)

    return trains(k, fn, None, [w0], [buffer])
