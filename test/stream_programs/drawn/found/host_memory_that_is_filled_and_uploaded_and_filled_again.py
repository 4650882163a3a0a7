"""Host memory that is filled and uploaded and filled again."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y out"


def build(k):
    s1 = k.stream()

    def fn(x, y, out):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            out.copy_(x, non_blocking=True)
            y.copy_(out, non_blocking=True)
            v1 = y * 2
            out.copy_(v1, non_blocking=True)
            y.copy_(out, non_blocking=True)
        current.wait_stream(s1)
        return (v1,)

    return calls(k, fn)
