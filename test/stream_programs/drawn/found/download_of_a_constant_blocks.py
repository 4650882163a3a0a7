"""Download of a constant blocks."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state ready"


def build(k):
    s1 = k.stream()
    s3 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state, ready):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s3):
            with torch.cuda.stream(s1):
                s1.wait_event(ready)
                v1 = torch.zeros_like(buffer)
            s3.wait_stream(current)
            v2 = (x.sum()).clamp(-2, 2)
            v3 = (buffer.sum()).clamp(-2, 2)
            v4 = v3 + state
            done1 = s1.record_event()
            done1.wait()
            v5 = v1.cpu()
        return v2, v3, v4, v5

    return calls(k, fn, [buffer])
