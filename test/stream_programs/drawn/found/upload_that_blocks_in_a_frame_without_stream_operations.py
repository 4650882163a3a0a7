"""Upload that blocks in a frame without stream operations."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state pinned n"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y, state, pinned, n):
        current = torch.cuda.current_stream()
        y[:, ::2].add_(state[:, ::2])
        y.clamp_(-2, 2)
        v1 = x + buffer
        v2 = (buffer.sum()).clamp(-2, 2)
        v3 = pinned.to("cuda")
        torch._dynamo.graph_break()
        with torch.cuda.stream(s1):
            v4 = v1 * 2 if n > 2 else v1 + x
        done1 = torch.cuda.Event()
        done1.record(s1)
        current.wait_event(done1)
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
