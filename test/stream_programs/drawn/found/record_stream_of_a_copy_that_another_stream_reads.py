"""Record stream of a copy that another stream reads."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    s3 = k.stream()

    def fn(state):
        current = torch.cuda.current_stream()
        v1 = state.view(32, 32)
        v1[1:9] = 3
        v2 = v1.sum()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v3 = v1.clone()
            state.mul_(2)
            state.clamp_(-2, 2)
            with torch.cuda.stream(s3):
                v3.record_stream(s2)
        current.wait_stream(s1)
        return v1, v2, v3

    return calls(k, fn)
