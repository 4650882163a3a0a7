"""View of an upload on a side stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "pinned ready"


def build(k):
    s1 = k.stream()

    def fn(pinned, ready):
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v1 = pinned.to("cuda")
            v2 = v1.t()
        v3 = pinned.to("cuda", non_blocking=True)
        return v1, v2, v3

    return calls(k, fn)
