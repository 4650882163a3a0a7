"""Frame of views that only waits."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state ready"


def build(k):
    s1 = k.stream()

    def fn(state, ready):
        s1.wait_event(ready)
        v1 = state[1:]
        torch._dynamo.graph_break()
        with torch.cuda.stream(s1):
            v2 = state + 1
        torch.cuda.current_stream().wait_stream(s1)
        return v1, v2

    return calls(k, fn)
