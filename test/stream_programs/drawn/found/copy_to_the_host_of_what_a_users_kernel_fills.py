"""Copy to the host of what a user's kernel fills: memory made from nothing was taken for a constant, so it blocked."""

from stream_programs.drawn.kit import calls, scaled_into, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(x, state):
        current = torch.cuda.current_stream()
        v1 = torch.empty(32, 32, device="cuda")
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            scaled_into(v1, x.contiguous(), 2)
            v2 = torch.empty(32, 32, pin_memory=True)
            v2.copy_(v1, non_blocking=True)
        with torch.cuda.stream(s2):
            s2.wait_stream(s1)
            v3 = v1 * state
            v4 = v1.to("cpu", non_blocking=True)
        return v2, v3, v4

    return calls(k, fn)
