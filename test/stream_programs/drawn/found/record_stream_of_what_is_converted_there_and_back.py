"""Record stream of what is converted there and back."""

from stream_programs.drawn.kit import calls


INPUTS = "x"


def build(k):
    s1 = k.stream()

    def fn(x):
        v1 = x.double().float()
        v1.record_stream(s1)
        return (v1,)

    return calls(k, fn)
