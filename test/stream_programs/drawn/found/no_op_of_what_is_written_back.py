"""No op of what is written back."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state):
        current = torch.cuda.current_stream()
        state[4:20].copy_(buffer[8:24])
        v1 = torch.zeros_like(buffer)
        v2 = v1 + buffer
        v3 = v2 + state
        with torch.cuda.stream(s1):
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            v4 = v1 + state
        current.wait_stream(s1)
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
