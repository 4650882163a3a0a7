"""Upload that is returned and copied to another result."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state pinned"


def build(k):
    s1 = k.stream()

    def fn(state, pinned):
        v3 = state.clone()
        v5 = v3.view(32, 32)
        v6 = pinned.to("cuda")
        with torch.cuda.stream(s1):
            v3.copy_(v6)
        done1 = s1.record_event()
        done1.wait()
        return v3, v5, v6

    return calls(k, fn)
