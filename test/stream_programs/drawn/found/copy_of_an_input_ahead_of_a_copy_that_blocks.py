"""Copy of an input before a copy that blocks."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state pinned"


def build(k):
    s2 = k.stream()
    s3 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, state, pinned):
        current = torch.cuda.current_stream()
        v1 = y * 2
        done1 = torch.cuda.Event()
        done1.record(s2)
        torch._dynamo.graph_break()
        s3.wait_stream(current)
        v2 = state.clone()
        v3 = pinned.to("cuda")
        v4 = buffer.clamp(-1, 1) @ v2.sign()
        return v1, v3, v4

    return calls(k, fn, [buffer])
