"""Constant that is copied, and the host waits, to host memory which an earlier frame uploads."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "out"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(out):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            buffer.copy_(out, non_blocking=True)
            torch._dynamo.graph_break()
            v1 = torch.ones(32, 32, device="cuda")
            out.copy_(v1)
        current.wait_stream(s1)
        return v1

    return calls(k, fn, [buffer])
