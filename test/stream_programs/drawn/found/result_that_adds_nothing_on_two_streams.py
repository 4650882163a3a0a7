"""Result that adds nothing on two streams."""

from stream_programs.drawn.kit import calls, torch


INPUTS = ""


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn():
        current = torch.cuda.current_stream()
        v1 = torch.zeros_like(buffer)
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v2 = v1 + buffer
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                s1.wait_stream(s2)
                v2.add_(v1)
        current.wait_stream(s1)
        return v1, v2

    return calls(k, fn, [buffer])
