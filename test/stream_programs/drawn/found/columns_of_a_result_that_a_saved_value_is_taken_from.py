"""Columns of a result that a saved value is taken from."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "state ready"


def build(k):
    s2 = k.stream()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(state, ready):
        current = torch.cuda.current_stream()
        v1 = sleep(buffer) + state
        with torch.cuda.stream(s2):
            s2.wait_event(ready)
            v2 = torch.ones(32, 32, device="cuda")
        v3 = sleep(state) @ w0
        done1 = torch.cuda.Event()
        done1.record(s2)
        current.wait_event(done1)
        v1[:, ::2].add_(v2[:, ::2])
        v4 = v1 @ w0
        return v1, v2, v3, v4

    return trains(k, fn, None, [w0], [buffer])
