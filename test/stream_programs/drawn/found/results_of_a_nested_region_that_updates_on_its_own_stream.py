"""Results of a nested region that updates on its own stream: the caller may drop them as soon as it has read them."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    @torch.compiler.nested_compile_region
    def block(x, y):
        current = torch.cuda.current_stream()
        v1 = x * 2
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            v1.add_(y)
        current.wait_stream(s1)
        return v1

    def fn(x, y):
        return block(x, y), block(y, x)

    return calls(k, fn)
