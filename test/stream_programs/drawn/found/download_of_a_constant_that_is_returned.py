"""Download of a constant that is returned."""

from stream_programs.drawn.kit import calls, double, torch, weight


INPUTS = "x state ready"


def build(k):
    s1 = k.stream()
    s3 = k.stream()
    s4 = k.stream()
    w1 = weight(k)

    def fn(x, state, ready):
        current = torch.cuda.current_stream()
        v1 = double(state) @ w1
        with torch.cuda.stream(s3):
            s3.wait_event(ready)
            v2 = torch.zeros_like(x)
            torch.cuda.synchronize()
            v3 = double(state) * 3
            with torch.cuda.stream(s4):
                done1 = torch.cuda.Event()
                done1.record(s3)
                s4.wait_event(done1)
                v4 = torch.where(v3 > 0, v3, v1)
                current.wait_stream(s1)
                v5 = v2.cpu()
                v6 = v5 + 1
        current.wait_stream(s4)
        return v4, v5, v6

    return calls(k, fn)
