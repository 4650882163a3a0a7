"""Part of an input that is updated while others read the rest."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = x * 2
            v2 = v1[3:4]
            with torch.cuda.stream(s2):
                torch._dynamo.graph_break()
                s2.wait_stream(s1)
                v1[0, 0].sub_(x[1, 1]).mul_(2)
        current.wait_stream(s2)
        return (v2,)

    return calls(k, fn)
