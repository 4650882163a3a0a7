"""View that is an operator call launches nothing."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = torch.complex(x, y)
        v2 = x @ y
        v3 = torch.view_as_real(v1)[..., 0]
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v4 = v2 @ v2
        current.wait_stream(s1)
        return v3, v4

    return calls(k, fn)
