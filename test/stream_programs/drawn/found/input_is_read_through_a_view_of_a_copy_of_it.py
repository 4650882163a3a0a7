"""Input is read through a view of a copy of it."""

from stream_programs.drawn.kit import calls, F, torch


INPUTS = "x y state pinned"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y, state, pinned):
        current = torch.cuda.current_stream()
        current.wait_stream(s2)
        state.copy_(x)
        v1 = y + x
        v2 = y - x
        v3 = pinned.to("cuda")
        v4 = F.dropout(buffer, 0.5)
        with torch.cuda.stream(s1):
            v5 = v2.clone()
            y[:, ::2].add_(state[:, ::2])
            y.clamp_(-2, 2)
        current.wait_stream(s1)
        return v2, v3, v4, v5

    return calls(k, fn, [buffer])
