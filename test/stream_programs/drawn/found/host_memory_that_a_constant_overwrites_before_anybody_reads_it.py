"""Host memory that a constant overwrites before anybody reads it."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y out"


def build(k):
    s1 = k.stream()

    def fn(x, y, out):
        current = torch.cuda.current_stream()
        v1 = torch.ones(32, 32, device="cuda")
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            out.copy_(y, non_blocking=True)
            v2 = x * 2
            out[3].copy_(v2[5], non_blocking=True)
            done1 = torch.cuda.Event()
            done1.record(s1)
            out.copy_(v1, non_blocking=True)
        current.wait_event(done1)
        y.add_(1)
        current.wait_stream(s1)
        return (v2,)

    return calls(k, fn)
