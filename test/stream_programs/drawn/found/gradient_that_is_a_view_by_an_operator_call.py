"""Gradient that is a view by an operator call."""

from stream_programs.drawn.kit import F, torch, trains


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state):
        current = torch.cuda.current_stream()
        v1 = buffer + state
        v2 = torch.zeros_like(state)
        with torch.cuda.stream(s1):
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            v3 = F.pad(v1, (1, 1))[:, 1:33]
            v4 = torch.view_as_real(torch.complex(x, v3))[..., 0]
        current.wait_stream(s1)
        return v1, v2, v3, v4

    return trains(k, fn, 0, [], [buffer])
