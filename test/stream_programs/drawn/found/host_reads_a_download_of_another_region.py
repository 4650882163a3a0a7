"""Host reads a download of another region."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state):
        current = torch.cuda.current_stream()
        v1 = buffer.to("cpu", non_blocking=True)
        v2 = buffer + state
        with torch.cuda.stream(s1):
            current.synchronize()
            v3 = v1 + 1
        return v1, v2, v3

    return calls(k, fn, [buffer])
