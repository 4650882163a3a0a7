"""Result is read in the place of what it was copied to."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y pinned n"


def build(k):
    s1 = k.stream()

    def fn(y, pinned, n):
        current = torch.cuda.current_stream()
        v1 = pinned.to("cuda")
        y.copy_(v1)
        with torch.cuda.stream(s1):
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            v2 = y + y if n > 0 else y * 2
        return v1, v2

    return calls(k, fn)  # unjoined
