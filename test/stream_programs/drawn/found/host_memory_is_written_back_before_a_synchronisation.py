"""Host memory is written back before a synchronisation."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "out"


def build(k):
    buffer = k.parameter(32, 32)

    def fn(out):
        current = torch.cuda.current_stream()
        v1 = buffer.to("cpu", non_blocking=True)
        out.copy_(buffer, non_blocking=True)
        current.synchronize()
        v2 = v1.to("cuda")
        return v1, v2

    return calls(k, fn, [buffer])
