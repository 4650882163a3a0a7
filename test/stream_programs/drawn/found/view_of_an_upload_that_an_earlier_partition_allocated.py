"""View of an upload that an earlier partition allocated."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x pinned"


def build(k):
    s3 = k.stream()
    w0 = weight(k, True)

    def fn(x, pinned):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s3):
            s3.wait_stream(current)
            v7 = torch.empty(32, 32, device="cuda")
            v7.copy_(pinned, non_blocking=True)
            v8 = v7.clone()
        v10 = torch.view_as_complex(v7.view(32, 16, 2))
        v11 = x @ w0
        current.wait_stream(s3)
        return v8, v10, v11

    return trains(k, fn, 0, [w0])
