"""Event that a stream awaits without launching orders the read of a view."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "z"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    e1 = torch.cuda.Event()

    def fn(z):
        current = torch.cuda.current_stream()
        v1 = z.real - z.imag
        e1.record(current)
        s1.wait_event(e1)
        s2.wait_event(e1)
        with torch.cuda.stream(s1):
            v2 = v1 * 2
        current.wait_stream(s1)
        return (v2,)

    return calls(k, fn)
