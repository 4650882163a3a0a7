"""Row that an update left alone which the host had waited for in training."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x y"


def build(k):
    s3 = k.stream()
    w0 = weight(k, True)

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = y @ w0
        v2 = v1 * 2
        v3 = v1 + x
        with torch.cuda.stream(s3):
            done1 = torch.cuda.Event()
            done1.record(current)
            done1.synchronize()
            v2[4:20].copy_(x[8:24])
            v4 = v2[3:4]
        return v3, v4

    return trains(k, fn, 0, [w0], [])
