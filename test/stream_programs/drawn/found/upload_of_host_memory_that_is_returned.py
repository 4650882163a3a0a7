"""Upload of host memory that is returned."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(state):
        current = torch.cuda.current_stream()
        v1 = buffer.cpu()
        with torch.cuda.stream(s1):
            buffer.add_(state)
            buffer.clamp_(-2, 2)
            with torch.cuda.stream(s2):
                v2 = v1.to("cuda", non_blocking=True)
        current.wait_stream(s1)
        current.wait_stream(s2)
        return v1, v2

    return calls(k, fn, [buffer])
