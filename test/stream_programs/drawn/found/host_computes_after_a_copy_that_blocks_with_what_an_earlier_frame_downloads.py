"""Host computes, after a copy that blocks it, with what an earlier frame downloads."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = torch.zeros(32, 32, pin_memory=True)
        v1[4:20].copy_(buffer[8:24], non_blocking=True)
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            torch._dynamo.graph_break()
            v2 = x + 1
            v3 = y.cpu()
            v4 = v1.clamp(-1, 1)
        current.wait_stream(s1)
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
