"""Tensor that is read before it is given as out."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()
    sleep = k.sleep

    def fn(x):
        current = torch.cuda.current_stream()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1 = torch.full((32, 32), 1.0, device="cuda")
        v2 = torch.ones(32, 32, device="cuda")
        current.wait_stream(s1)
        v3 = sleep(v1) * 3
        torch.add(v1, v2, out=v1)
        return v1, v2, v3

    return calls(k, fn)
