"""Memory of another regions side stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state pinned"


def build(k):
    s1 = k.stream()

    def fn(state, pinned):
        current = torch.cuda.current_stream()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1 = pinned.to("cuda", non_blocking=True)
        current.wait_stream(s1)
        v2 = v1.amax(1, keepdim=True)
        with torch.cuda.stream(s1):
            v3 = state * 2
        current.wait_stream(s1)
        return v2, v3

    return calls(k, fn)
