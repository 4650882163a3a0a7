"""Noise of the layout of an input that nobody has waited for."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state"


def build(k):
    s1 = k.stream()

    def fn(y, state):
        y.record_stream(torch.cuda.current_stream())
        v1 = torch.randn_like(state)
        return (v1,)

    return calls(k, fn, loads=(s1, [0, 1]))
