"""Promise by which another stream comes after a reader of its memory."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state ready"


def build(k):
    s2 = k.stream()
    s4 = k.stream()
    s5 = k.stream()

    def fn(x, y, state, ready):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s4):
            s4.wait_event(ready)
            v3 = x - y
            with torch.cuda.stream(s2):
                s2.wait_stream(current)
                s2.wait_stream(s4)
                v4 = v3.relu()
            v5 = y.clamp(-1, 1) @ state.sign()
        v4.record_stream(s5)
        current.wait_stream(s2)
        current.wait_stream(s4)
        return v5

    return calls(k, fn)
