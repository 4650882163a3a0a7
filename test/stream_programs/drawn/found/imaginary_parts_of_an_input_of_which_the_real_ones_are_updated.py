"""Imaginary parts of an input of which the real ones are updated."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state z"


def build(k):
    s1 = k.stream()

    def fn(state, z):
        current = torch.cuda.current_stream()
        current.wait_stream(s1)
        z.real.add_(state)
        v1 = z.imag
        v2 = state * 2
        with torch.cuda.stream(s1):
            v3 = torch.ones(32, 32, device="cuda")
        current.wait_stream(s1)
        return v1, v2, v3

    return calls(k, fn, [], loads=(s1, [0, 1]))
