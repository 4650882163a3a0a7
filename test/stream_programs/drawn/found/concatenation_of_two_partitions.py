"""Concatenation of two partitions."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y pinned"


def build(k):
    s3 = k.stream()
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, y, pinned):
        x[:, ::2].add_(y[:, ::2])
        x.clamp_(-2, 2)
        v1 = pinned.to("cuda")
        with torch.cuda.stream(s3):
            v2 = y * 2
            v3 = torch.cat([v1, y])[16:48]
            v4 = sleep(y) + buffer
        done1 = s3.record_event()
        done1.wait()
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
