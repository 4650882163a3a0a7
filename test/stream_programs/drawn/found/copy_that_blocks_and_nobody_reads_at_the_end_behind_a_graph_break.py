"""Copy that blocks and nobody reads at the end after a graph break."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = x * 2
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v2 = y + 1
        current.wait_stream(s2)
        torch._dynamo.graph_break()
        with torch.cuda.stream(s1):
            v3 = v1 * 3
            v1.cpu()
        return v2, v3

    return calls(k, fn)
