"""Operator that realizes its arguments for itself reads what a side stream computes for an input."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state"


def build(k):
    s1 = k.stream()

    def fn(y, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            y.clamp_(-2, 2)
        current.wait_stream(s1)
        state[3].index_put_((torch.arange(4, device="cuda") * 2,), y[6, :4])
        return ()

    return calls(k, fn)
