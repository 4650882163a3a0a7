"""Product that is put into an input behind a synchronisation of the device, which waits for a reader of the input."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state"


def build(k):
    s1, s2 = k.stream(), k.stream()
    sleep = k.sleep

    def fn(x, y, state):
        current = torch.cuda.current_stream()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1 = sleep(state) * 2
        torch._dynamo.graph_break()
        s2.wait_stream(current)
        with torch.cuda.stream(s2):
            v2 = x * 3
        current.wait_stream(s2)
        v3 = torch.mm(x[:16], y)
        torch.cuda.synchronize()
        state[:16].copy_(v3)
        return v1, v2

    return calls(k, fn)
