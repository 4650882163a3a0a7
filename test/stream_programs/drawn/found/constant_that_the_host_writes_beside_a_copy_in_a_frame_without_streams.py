"""Constant that the host writes beside a copy in a frame without streams."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state out n"


def build(k):
    s1 = k.stream()
    s4 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y, state, out, n):
        v1 = buffer.zero_()
        out.copy_(y, non_blocking=True)
        v2 = x + y
        torch._foreach_copy_([out[2:4], out[8:20]], [buffer[6:8], buffer[12:24]], non_blocking=True)
        with torch.cuda.stream(s1):
            v3 = v2[:, 5:6]
            done1 = s4.record_event()
        buffer[1:9] = 3
        buffer.clamp_(-2, 2)
        return v3, v2 * 2

    return calls(k, fn, [buffer])
