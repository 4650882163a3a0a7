"""Memory is read, through a clone that a pass drops, after its stream waited for the clone."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "pinned"


def build(k):
    s1 = k.stream()

    def fn(pinned):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            v1 = pinned.to("cuda", non_blocking=True)
        current.wait_stream(s1)
        v2 = v1.clone()
        s1.wait_stream(current)
        v2.mul_(2)
        return (v2,)

    return calls(k, fn)
