"""List of tensors that another stream updates."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = x * 2
        v2 = y * 3
        v3 = v2.view(64, 16)
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            torch._foreach_add_([v1, v3], 1)
        current.wait_stream(s1)
        return v1, v3

    return calls(k, fn)
