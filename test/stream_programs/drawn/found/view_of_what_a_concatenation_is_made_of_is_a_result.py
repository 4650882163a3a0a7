"""A result is a view of what a concatenation is made of; a later frame updates the concatenation."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x):
        current = torch.cuda.current_stream()
        v1 = torch.empty(32, 32, device="cuda")
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            torch.mul(x, 2, out=v1)
        current.wait_stream(s1)
        v2 = torch.cat([v1, buffer])[16:48]
        v3 = v1.reshape(64, 16)
        torch._dynamo.graph_break()
        v2[4:20].copy_(buffer[8:24])
        return v2, v3

    return calls(k, fn, [buffer])
