"""Input that is updated before an event and recorded on a stream after it."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    e1 = torch.cuda.Event()

    def fn(x, state):
        current = torch.cuda.current_stream()
        state.copy_(x)
        e1.record(current)
        state.record_stream(s1)
        v1 = x + 1
        return (v1,)

    return calls(k, fn)
