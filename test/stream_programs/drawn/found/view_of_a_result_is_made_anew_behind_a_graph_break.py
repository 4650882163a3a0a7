"""View of a result is made anew after a graph break."""

from stream_programs.drawn.kit import torch, trains


INPUTS = "x y state ready n"


def build(k):
    s3 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y, state, ready, n):
        current = torch.cuda.current_stream()
        v1 = torch.zeros_like(state)
        with torch.cuda.stream(s3):
            s3.wait_event(ready)
            v2 = buffer.relu()
            s3.wait_stream(current)
            v3 = x + v1 if n > 4 else x + 1
            v4 = v2[:, 5:6]
            with torch.cuda.stream(current):
                v5 = (buffer.sum()).clamp(-2, 2)
                torch._dynamo.graph_break()
                v6 = y[:, 1:]
                state[1:9] = 3
                state.clamp_(-2, 2)
                done1 = s3.record_event()
                done1.wait()
                v7 = v4 + 1
                v2.mul_(2)
        return v3, v4, v5, v6, v7

    return trains(k, fn, 0, [], [buffer])
