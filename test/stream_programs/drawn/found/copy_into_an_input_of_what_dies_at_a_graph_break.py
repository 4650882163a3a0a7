"""Copy into an input of what dies at a graph break."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x pinned"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    s3 = k.stream()
    e2 = torch.cuda.Event()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)

    def fn(x, pinned):
        s3.synchronize()
        v1 = pinned.to("cuda", non_blocking=True)
        v2 = x.detach().amax(1, keepdim=True)
        v3 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            buffer.copy_(v1)
            s2.synchronize()
            v4 = buffer[1:]
            with torch.cuda.stream(s3):
                torch._dynamo.graph_break()
        v5 = x @ w0
        e2.record(s1)
        e2.wait()
        return v2, v3, v4, v5

    return trains(k, fn, 0, [w0], [buffer])
