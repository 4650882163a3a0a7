"""Host memory of an upload is not written by the next host operation."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y"


def build(k):
    s1 = k.stream()

    def fn(y):
        current = torch.cuda.current_stream()
        v1 = y.cpu()
        h1 = v1 * 2
        s1.wait_stream(current)
        with torch.cuda.stream(s1):
            d1 = h1.to("cuda", non_blocking=True)
            h3 = v1.cumsum(0) + 3
            d3 = h3.to("cuda", non_blocking=True)
        current.wait_stream(s1)
        return v1, d1, d3

    return calls(k, fn)
