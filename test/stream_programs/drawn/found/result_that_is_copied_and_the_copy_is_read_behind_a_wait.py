"""Result that is copied and the copy is read after a wait."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    s3 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y):
        current = torch.cuda.current_stream()
        v1 = buffer - y
        torch.cuda.synchronize()
        with torch.cuda.stream(s2):
            v2 = torch.ones(32, 32, device="cuda")
            v3 = v1.t().clone(memory_format=torch.contiguous_format)
            with torch.cuda.stream(s3):
                s3.wait_stream(s2)
                v2.copy_(v3)
                s1.wait_stream(s3)
                v4 = (v2.cumsum(0)).clamp(-2, 2)
        current.wait_stream(s2)
        current.wait_stream(s3)
        return v3, v4

    return calls(k, fn, [buffer])
