"""One of several outputs of a kernel."""

from stream_programs.drawn.kit import F, torch, trains, weight


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    w0 = weight(k, True)

    def fn(x, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            state.clamp_(-2, 2)
            v1 = F.dropout(state, 0.5)
        v2 = x @ w0
        current.wait_stream(s1)
        return v1, v2

    return trains(k, fn, 0, [w0])
