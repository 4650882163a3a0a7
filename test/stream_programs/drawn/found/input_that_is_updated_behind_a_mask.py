"""Input that is updated under a mask."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            buffer[buffer > 0] = 1
        current.wait_stream(s1)
        v1 = buffer + state
        return (v1,)

    return calls(k, fn, [buffer])
