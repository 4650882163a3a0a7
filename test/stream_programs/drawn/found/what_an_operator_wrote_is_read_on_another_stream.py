"""What an operator wrote is read on another stream."""

from stream_programs.drawn.kit import add_to, calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, state):
        current = torch.cuda.current_stream()
        add_to(x, buffer)
        x.clamp_(-2, 2)
        with torch.cuda.stream(s1):
            done1 = current.record_event()
            done1.wait()
            v1 = x + state
        return (v1,)

    return calls(k, fn, [buffer])  # unjoined
