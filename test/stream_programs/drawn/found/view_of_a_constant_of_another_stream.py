"""View of a constant of another stream."""

from stream_programs.drawn.kit import calls, double, torch


INPUTS = "x y pinned n"


def build(k):
    s1 = k.stream()
    sleep = k.sleep

    def fn(x, y, pinned, n):
        current = torch.cuda.current_stream()
        v1 = pinned.to("cuda")
        v2 = x.cumsum(0)
        v3 = torch.ones(32, 32, device="cuda")
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v4 = v2.t().contiguous()
            v5 = (sleep(v4) + v4).clamp(-2, 2) if n > 0 else (sleep(v4) + v4).clamp(-2, 2)
            v6 = double(y.detach())
            v7 = v3[3:4]
        return v1, v4, v5, v6, v7

    return calls(k, fn)  # unjoined
