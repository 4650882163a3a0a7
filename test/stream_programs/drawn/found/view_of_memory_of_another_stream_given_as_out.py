"""View of memory of the caller's stream given as out: the view is a side stream's, the memory isn't."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x"


def build(k):
    s1 = k.stream()

    def fn(x):
        current = torch.cuda.current_stream()
        v1 = torch.empty(32, 32, device="cuda")
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            torch.mul(x.view(-1), 3, out=v1.view(-1))
        current.wait_stream(s1)
        return (v1,)

    return calls(k, fn)
