"""Update of a result of an earlier frame that needs a gradient."""

from stream_programs.drawn.kit import torch, trains, weight


INPUTS = "x y state ready"


def build(k):
    s1 = k.stream()
    w1 = weight(k, True)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, y, state, ready):
        with torch.cuda.stream(s1):
            ready.wait()
            v1 = state * 2
            v2 = sleep(y) @ w1
            torch._dynamo.graph_break()
            with torch.cuda.stream(s1):
                v3 = torch.where(buffer > 0, buffer, state)
                v2.mul_(2)
                v4 = sleep(x) * 3
        done1 = s1.record_event()
        done1.wait()
        return v1, v2, v3, v4

    return trains(k, fn, 0, [w1], [buffer])
