"""Upload that another stream writes to an input."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state pinned ready"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, y, state, pinned, ready):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v1 = y + state
            v2 = pinned.to("cuda")
            with torch.cuda.stream(s2):
                x.copy_(v2)
        current.wait_stream(s2)
        return v1, v2

    return calls(k, fn)
