"""Record after what the host computes."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s4 = k.stream()
    e2 = torch.cuda.Event()
    buffer = k.parameter(32, 32)

    def fn(x):
        v1 = x.cpu()
        v2 = int(buffer.detach().amax().item())
        v3 = torch.full((32, 32), 1.0 if v2 > 0 else 0.0, device="cuda")
        v4 = v1 * 2
        e2.record(s4)
        return v1, v3, v4

    return calls(k, fn, [buffer])
