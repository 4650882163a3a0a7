"""Download of a copy that is left out after an upload."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, state, pinned):
        current = torch.cuda.current_stream()
        v1 = buffer + state
        v2 = v1 + buffer
        with torch.cuda.stream(s1):
            v3 = torch.ones(32, 32, device="cuda")
        y.copy_(state)
        v4 = pinned.to("cuda")
        v5 = y.cpu()
        current.wait_stream(s1)
        return v1, v2, v3, v4, v5

    return calls(k, fn, [buffer])
