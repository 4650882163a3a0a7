"""Update on another stream lives on after a break."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state ready"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    e1 = torch.cuda.Event()

    def fn(x, y, state, ready):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s2):
            s2.wait_event(ready)
            v1 = y.clamp(-1, 1) * x
        e1.record(s2)
        current.wait_event(e1)
        v1[1:9] = 3
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v2 = state.clamp(-1, 1) * y
            v3 = v2 * 2
            torch._dynamo.graph_break()
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            v4 = v1 - x
            v5 = torch.zeros_like(y)
        return v2, v3, v4, v5

    return calls(k, fn)  # unjoined
