"""Update under a mask of a result of a list."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            done1 = current.record_event()
            done1.wait()
            v1 = torch._foreach_mul([buffer, y], 2)[1]
        v2 = x * 2
        current.wait_stream(s1)
        v1.masked_fill_(v1 > 0, 1)
        return v1, v2

    return calls(k, fn, [buffer])
