"""Concatenation whose memory is taken after a record."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    e2 = torch.cuda.Event()
    sleep = k.sleep

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = sleep(y) * 3
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            e2.record(current)
            v2 = torch.zeros_like(x)
            v1.zero_()
            v3 = x.t()
            with torch.cuda.stream(current):
                done1 = s1.record_event()
                done1.wait()
                v4 = torch.cat([v1, v3])[16:48]
        return v2, v4

    return calls(k, fn)
