"""Record stream of an input that was updated."""

from stream_programs.drawn.kit import calls


INPUTS = "x"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x):
        x[0].add_(1)
        x.clamp_(-2, 2)
        v1 = buffer.detach().amax(1, keepdim=True)
        x[1].record_stream(s1)
        v2 = v1 + buffer
        v3 = x + buffer
        v4 = x.view(32, 32)
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
