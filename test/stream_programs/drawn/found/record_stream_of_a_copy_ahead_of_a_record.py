"""Record stream of a copy before a record."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()
    e1 = torch.cuda.Event()

    def fn(x):
        current = torch.cuda.current_stream()
        v1 = x.clone()
        e1.record(current)
        v2 = v1.clone()
        e1.record(current)
        v1.record_stream(s1)
        return (v2,)

    return calls(k, fn)
