"""Out of the callers memory outside of a stream block."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y):
        current = torch.cuda.current_stream()
        torch.add(x, buffer, out=x)
        x.clamp_(-2, 2)
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = x + y
        return (v1,)

    return calls(k, fn, [buffer])  # unjoined
