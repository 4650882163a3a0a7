"""Event after an update of an earlier result that needs a gradient."""

from stream_programs.drawn.kit import add_to, torch, trains


INPUTS = "x y state"


def build(k):
    s2 = k.stream()
    e1 = torch.cuda.Event()
    buffer = k.parameter(32, 32)

    def fn(x, y, state):
        current = torch.cuda.current_stream()
        v1 = state + x
        torch._dynamo.graph_break()
        v2 = (v1 > 0).float()
        v3 = buffer.relu()
        with torch.cuda.stream(s2):
            done1 = torch.cuda.Event()
            done1.record(current)
            s2.wait_event(done1)
            add_to(y, state)
            y.clamp_(-2, 2)
            v1.mul_(2)
            e1.record(s2)
        current.wait_event(e1)
        return v1, v2, v3

    return trains(k, fn, 0, [], [buffer])
