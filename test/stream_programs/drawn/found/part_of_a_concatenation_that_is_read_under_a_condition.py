"""Part of a concatenation that is read under a condition."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, state):
        v1 = buffer - x
        v2 = sleep(x) + state
        v3 = torch.cat([v2, v1 * 2])[16:48]
        with torch.cuda.stream(s1):
            v4 = buffer.view(32, 32)
        x[4:20].copy_(v2[8:24])
        x.clamp_(-2, 2)
        return v3, v4

    return calls(k, fn, [buffer])
