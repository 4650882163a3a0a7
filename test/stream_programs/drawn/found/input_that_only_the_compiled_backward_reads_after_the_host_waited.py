"""Input that only the compiled backward reads after the host waited."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    e1 = torch.cuda.Event()

    def fn(x, y):
        current = torch.cuda.current_stream()
        e1.record(s1)
        current.wait_event(e1)
        v1 = y.clamp(-1, 1) * x
        v2 = int(v1.detach().amax().item())
        v3 = torch.full((32, 32), 1.0 if v2 > 0 else 0.0, device="cuda")
        return v1, v3

    return trains(k, fn, 0, [], loads=(s1, [0, 1]))
