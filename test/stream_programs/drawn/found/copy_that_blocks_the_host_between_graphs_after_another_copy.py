"""Copy that blocks the host, outside of a graph, comes after a copy of another stream for which its stream waited."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "pinned out ready"


def build(k):
    s1 = k.stream()
    s3 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(pinned, out, ready):
        current = torch.cuda.current_stream()
        s3.wait_event(ready)
        torch._dynamo.graph_break()
        out.copy_(buffer, non_blocking=True)
        with torch.cuda.stream(s1):
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            v1 = pinned.to("cuda")
        return (v1,)

    return calls(k, fn, [buffer])
