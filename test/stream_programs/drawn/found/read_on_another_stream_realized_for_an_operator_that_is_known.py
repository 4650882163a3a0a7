"""Read on another stream realized for an operator that is known."""

from stream_programs.drawn.kit import add_to, calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            state[4:20].copy_(x[8:24])
        v1 = buffer + x
        with torch.cuda.stream(s1):
            done2 = torch.cuda.Event()
            done2.record(current)
            s1.wait_event(done2)
            v2 = v1.clone()
            s1.wait_stream(s2)
            add_to(state, v2)
            state.clamp_(-2, 2)
        current.wait_stream(s1)
        return (v2,)

    return calls(k, fn, [buffer])
