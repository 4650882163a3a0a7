"""Sum with zeros is updated after a record."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "x y pinned n"


def build(k):
    s1 = k.stream()
    e2 = torch.cuda.Event()
    w1 = weight(k)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, y, pinned, n):
        current = torch.cuda.current_stream()
        v1 = torch.zeros_like(buffer)
        v2 = v1 + y
        v3 = y.detach().amax(1, keepdim=True)
        torch._dynamo.graph_break()
        v4 = buffer.sum(1, keepdim=True)
        y[4:20].copy_(buffer[8:24])
        v5 = pinned.to("cuda", non_blocking=True)
        v6 = (sleep(v5) + v4).clamp(-2, 2)
        y.record_stream(s1)
        v7 = v6.detach().clone()
        for _ in range(n):
            v7 = v7.clamp(-2, 2) + 1
        v8 = x + 1
        v9 = torch.ones(32, 32, device="cuda")
        v10 = v9 @ w1
        e2.record(current)
        v2.add_(v9)
        return v7, v8, v9, v10

    return calls(k, fn, [buffer])
