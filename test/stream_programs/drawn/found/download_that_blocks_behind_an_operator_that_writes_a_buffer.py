"""Download that blocks after an operator that writes a buffer."""

from stream_programs.drawn.kit import add_to, calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state):
        current = torch.cuda.current_stream()
        add_to(buffer, state)
        buffer.clamp_(-2, 2)
        v1 = buffer.cpu()
        torch._dynamo.graph_break()
        with torch.cuda.stream(s1):
            v2 = buffer * 2
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn, [buffer])
