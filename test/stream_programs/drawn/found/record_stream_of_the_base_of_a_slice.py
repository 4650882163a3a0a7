"""Record stream of the base of a slice."""

from stream_programs.drawn.kit import calls


INPUTS = "state"


def build(k):
    # unjoined
    s1 = k.stream()

    def fn(state):
        v1 = state.t() * 2
        v2 = v1[:, ::2]
        v1.record_stream(s1)
        return (v2,)

    return calls(k, fn)
