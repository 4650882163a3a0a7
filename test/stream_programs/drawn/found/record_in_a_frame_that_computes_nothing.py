"""Record in a frame that computes nothing."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()

    def fn(x):
        current = torch.cuda.current_stream()
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            done1 = torch.cuda.Event()
            done1.record()
        return (x,)

    return calls(k, fn)
