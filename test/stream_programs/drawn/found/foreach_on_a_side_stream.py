"""Foreach on a side stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            y.mul_(2)
            torch._dynamo.graph_break()
            v1, v2 = torch._foreach_add([x, y], 1)
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn)
