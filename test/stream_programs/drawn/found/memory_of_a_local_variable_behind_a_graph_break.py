"""Memory of a local variable after a graph break."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state ready n"


def build(k):
    s1 = k.stream()
    e1 = torch.cuda.Event()
    buffer = k.parameter(32, 32)

    def fn(x, y, state, ready, n):
        current = torch.cuda.current_stream()
        v1 = y + state
        v2 = buffer.sum(0, keepdim=True)
        with torch.cuda.stream(s1):
            ready.wait()
            v3 = buffer + 1
            e1.record(current)
            s1.wait_event(e1)
            v4 = (v3 + v2).clamp(-2, 2)
            v5 = buffer.detach().clone()
            for _ in range(n):
                v5 = v5.clamp(-2, 2) + 1
            torch._dynamo.graph_break()
        v6 = x.clone()
        current.wait_stream(s1)
        return v3, v4, v5, v6

    return calls(k, fn, [buffer])
