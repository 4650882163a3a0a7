"""Copy of an input that an update of a list changes."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()

    def fn(x):
        torch._foreach_mul_([x], 2)
        v1 = x.clone()
        s1.wait_stream(torch.cuda.current_stream())
        torch._dynamo.graph_break()
        v2 = x + 1
        return v1, v2

    return calls(k, fn)
