"""Memory that a side stream fills for a later frame."""

from stream_programs.drawn.kit import calls, scaled_into, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x):
        current = torch.cuda.current_stream()
        v1 = torch.empty(32, 32, device="cuda")
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            scaled_into(v1, buffer.contiguous(), 2)
        current.wait_stream(s2)
        scaled_into(v1, v1, 2)
        v2 = x * 2
        with torch.cuda.stream(s1):
            torch._dynamo.graph_break()
            s1.wait_stream(current)
            v3 = torch.where(v1 > 0, v1, x)  # unjoined
        return v2, v3

    return calls(k, fn, [buffer])
