"""Concatenation of inputs on a side stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            buffer.add_(state)
            buffer.clamp_(-2, 2)
            torch._dynamo.graph_break()
            v1 = torch.cat([x, buffer])[16:48]
            x.add_(buffer)
            x.clamp_(-2, 2)
        current.wait_stream(s1)
        return (v1,)

    return calls(k, fn, [buffer])
