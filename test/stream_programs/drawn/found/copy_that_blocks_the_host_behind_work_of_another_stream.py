"""Copy that blocks the host after work of another stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state pinned n"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state, pinned, n):
        current = torch.cuda.current_stream()
        v1 = buffer + buffer if n > 0 else buffer + buffer
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v2 = pinned.to("cuda")
            with torch.cuda.stream(s1):
                torch._dynamo.graph_break()
                v3 = v2 + state
        current.wait_stream(s1)
        return v1, v2, v3

    return calls(k, fn, [buffer])
