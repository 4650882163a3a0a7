"""Download that blocks between two updates by operators and a matrix product."""

from stream_programs.drawn.kit import add_to, torch, trains, weight


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    w0 = weight(k, True)
    buffer = k.parameter(32, 32)

    def fn(x, y):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            v0 = torch.ones(32, 32, device="cuda")
        current.wait_stream(s1)
        buffer.add_(x.detach())
        buffer.clamp_(-2, 2)
        v1 = (buffer > 0).float()
        v2 = y.cpu()
        add_to(v1, x.detach())
        v3 = x @ w0
        return v0, v1, v2, v3

    return trains(k, fn, 0, [w0], [buffer])
