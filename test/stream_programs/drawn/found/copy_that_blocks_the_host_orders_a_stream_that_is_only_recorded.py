"""Copy that blocks the host orders a stream that is only recorded."""

from stream_programs.drawn.kit import calls


INPUTS = "state"


def build(k):
    s4 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state):
        state.add_(buffer)
        state.clamp_(-2, 2)
        v1 = buffer.cpu()
        buffer.record_stream(s4)
        return (v1,)

    return calls(k, fn, [buffer])
