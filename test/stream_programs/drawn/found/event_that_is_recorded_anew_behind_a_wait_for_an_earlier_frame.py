"""Event that is recorded anew after a wait for an earlier frame."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    s3 = k.stream()
    e1 = torch.cuda.Event()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)

    def fn(x, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = state.clamp(-1, 1) * buffer
            e1.record(s1)
            torch._dynamo.graph_break()
            with torch.cuda.stream(s3):
                s3.wait_event(e1)
                v1.clamp_(-2, 2)
                e1.record(current)
        v2 = x @ w0
        done1 = torch.cuda.Event()
        done1.record(s1)
        current.wait_event(done1)
        current.wait_stream(s3)
        return v1, v2

    return trains(k, fn, 0, [w0], [buffer])
