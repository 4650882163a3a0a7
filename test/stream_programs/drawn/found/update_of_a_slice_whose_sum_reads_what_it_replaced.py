"""Update of a slice whose sum reads what it replaced."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = state + y
            done1 = s1.record_event()
        done1.wait()
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v1[:, ::2].add_(buffer[:, ::2])
            s1.wait_stream(current)
            v2 = (v1.sum(1, keepdim=True)).clamp(-2, 2)
            v3 = v1.t()
        current.wait_stream(s2)
        return v2, v3

    return calls(k, fn, [buffer])
