"""Event after a copy to the host between graphs."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "x"


def build(k):
    s1 = k.stream()
    e1 = torch.cuda.Event()
    w0 = weight(k)
    buffer = k.parameter(32, 32)

    def fn(x):
        current = torch.cuda.current_stream()
        x[4:20].copy_(buffer[8:24])
        v1 = x.to("cpu", non_blocking=True)
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v2 = buffer @ w0
            e1.record(s1)
        current.wait_event(e1)
        return v1, v2

    return calls(k, fn, [buffer])
