"""What is read after a synchronisation of the device may be of an earlier frame."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y n"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    sleep = k.sleep

    def fn(x, y, n):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = (sleep(x).sum()).clamp(-2, 2)
        torch._dynamo.graph_break()
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            y.clamp_(-2, 2)
            v2 = y - 1
        torch.cuda.synchronize()
        v3 = torch.where(y > 0, y, v1)
        return v2, v3

    return calls(k, fn)
