"""View of an input is copied beside the stream that updates it."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "y state pinned"


def build(k):
    s1 = k.stream()
    w1 = weight(k)
    buffer = k.parameter(32, 32)

    def fn(y, state, pinned):
        current = torch.cuda.current_stream()
        v1 = buffer + state
        v2 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            v3 = y + v1
            v4 = v2.relu()
            v5 = v3 - v1
            v6 = state.t()
            v6.clamp_(-2, 2)
            v7 = buffer @ w1
            v8 = state[8:24]
        current.wait_stream(s1)
        return v2, v5, v6, v7, v8

    return calls(k, fn, [buffer])
