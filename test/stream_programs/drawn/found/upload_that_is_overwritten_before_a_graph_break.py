"""Upload that is overwritten before a graph break."""

from stream_programs.drawn.kit import calls, double, torch, weight


INPUTS = "x y state pinned"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    s3 = k.stream()
    e1 = torch.cuda.Event()
    w0 = weight(k)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, y, state, pinned):
        current = torch.cuda.current_stream()
        v1 = buffer.cpu()
        v2 = state * 2
        with torch.cuda.stream(s3):
            v3 = pinned.to("cuda")
            y.mul_(2)
            y.clamp_(-2, 2)
            v3.copy_(buffer)
            v4 = x.clamp(-1, 1) @ y.sign()
            v5 = sleep(buffer) * 3
            torch._dynamo.graph_break()
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v6 = double(v2.detach())
                e1.record(s3)
                s1.wait_event(e1)
                v7 = v5 @ w0
                e1.record(s2)
        current.wait_stream(s1)
        return v1, v3, v4, v5, v6, v7

    return calls(k, fn, [buffer])
