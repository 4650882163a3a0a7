"""Upload that nobody reads blocks."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y pinned"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, y, pinned):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v1 = pinned.to("cuda")
            done1 = s1.record_event()
            v1.copy_(x)
            v2 = x + y
            v3 = y @ v1.sign()
        current.wait_stream(s2)
        return v1, v2, v3

    return calls(k, fn)
