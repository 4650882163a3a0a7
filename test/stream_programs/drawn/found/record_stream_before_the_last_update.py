"""Record stream before the last update."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = x + y
        v2 = v1[1:]
        v2.record_stream(s1)
        s2.wait_stream(current)
        with torch.cuda.stream(s2):
            v1.mul_(2)
            v3 = x * y
            v3.add_(1)
            v3.record_stream(s1)
            v3.mul_(2)
        current.wait_stream(s2)
        return v1, v2, v3

    return calls(k, fn)
