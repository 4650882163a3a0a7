"""Part of a concatenation that a later frame reads on another stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y"


def build(k):
    # unjoined
    s2 = k.stream()
    s4 = k.stream()
    e1 = torch.cuda.Event()

    def fn(x, y):
        current = torch.cuda.current_stream()
        y.clamp_(-2, 2)
        with torch.cuda.stream(s4):
            s4.wait_stream(current)
            v1 = torch.cat([y, x])[16:48]
            with torch.cuda.stream(s2):
                torch._dynamo.graph_break()
                e1.record(current)
                s2.wait_event(e1)
                e1.record(s4)
                s2.wait_event(e1)
                v2 = v1.clamp(-1, 1) @ x.sign()
                s4.wait_event(e1)
        return (v2,)

    return calls(k, fn)
