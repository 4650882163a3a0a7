"""Download of a constant in a frame without streams."""

from stream_programs.drawn.kit import calls, torch


INPUTS = ""


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn():
        current = torch.cuda.current_stream()
        current.wait_stream(s1)
        torch._dynamo.graph_break()
        buffer.zero_()
        v1 = buffer.cpu()
        return (v1,)

    return calls(k, fn, [buffer])
