"""Returned input that another stream reads."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            state.relu_()
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            s2.wait_stream(s1)
            v1 = state + x
            done1 = torch.cuda.Event()
            done1.record(s1)
            v2 = v1.sum(0, keepdim=True)
            v3 = state.view(32, 32)
        done1.wait()
        current.wait_stream(s2)
        return v2, v3

    return calls(k, fn)
