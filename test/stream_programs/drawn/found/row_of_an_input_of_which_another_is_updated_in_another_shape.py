"""Row of an input of which another is updated in another shape."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()

    def fn(x, state):
        current = torch.cuda.current_stream()
        current.wait_stream(s1)
        x.view(16, 64)[1].add_(state.view(16, 64)[2])
        v1 = x[8]
        v2 = state * 2
        with torch.cuda.stream(s1):
            v3 = torch.ones(32, 32, device="cuda")
        current.wait_stream(s1)
        return v1, v2, v3

    return calls(k, fn, [], loads=(s1, [0, 1]))
