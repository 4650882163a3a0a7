"""Memory of another stream given as out."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, state):
        current = torch.cuda.current_stream()
        v1 = state + y
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v2 = buffer.cumsum(0)
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                s1.wait_stream(s2)
                torch.add(v2, v1, out=v2)
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn, [buffer])
