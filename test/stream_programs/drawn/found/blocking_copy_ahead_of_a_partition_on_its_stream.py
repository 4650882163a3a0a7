"""Blocking copy before a partition on its stream."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "x y state"


def build(k):
    s1 = k.stream()
    s3 = k.stream()
    w0 = weight(k)
    sleep = k.sleep

    def fn(x, y, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = x * 3
            with torch.cuda.stream(s3):
                s3.wait_stream(s1)
                v2 = state.clone()
                torch._dynamo.graph_break()
                v3 = sleep(v1) @ w0
                v4 = v2.cpu()
        return v3, v4

    return calls(k, fn)
