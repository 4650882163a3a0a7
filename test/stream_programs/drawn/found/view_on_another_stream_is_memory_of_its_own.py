"""View on another stream is memory of its own."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state n"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y, state, n):
        current = torch.cuda.current_stream()
        v1 = state.detach().amax(1, keepdim=True)
        v2 = state.t()
        v3 = x + y
        v4 = x.t().contiguous()
        v5 = buffer + state if n > 4 else buffer + state
        with torch.cuda.stream(s1):
            v6 = v4[:, ::2]
            s1.wait_stream(current)
            v7 = torch.zeros_like(v3)
            v8 = torch.where(v6 > 0, v6, v1)
        # unjoined
        return v5, v6, v7, v8

    return calls(k, fn, [buffer])
