"""Memory that lives on is filled beside its reader."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(pinned):
        v1 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            v2 = v1 + buffer
            v1.zero_()
        return v1, v2

    return calls(k, fn, [buffer])  # unjoined
