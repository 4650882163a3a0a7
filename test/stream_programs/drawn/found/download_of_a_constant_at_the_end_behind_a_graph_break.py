"""Download of a constant at the end after a graph break."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y ready"


def build(k):
    s1 = k.stream()
    s3 = k.stream()

    def fn(x, y, ready):
        with torch.cuda.stream(s1):
            ready.wait()
            with torch.cuda.stream(s3):
                s3.wait_event(ready)
                v1 = int(y.detach().amax().item())
                v2 = torch.full((32, 32), 1.0 if v1 > 0 else 0.0, device="cuda")
                v3 = x.sum(0, keepdim=True)
                v4 = v2.cpu()
        return v3, v4

    return calls(k, fn)
