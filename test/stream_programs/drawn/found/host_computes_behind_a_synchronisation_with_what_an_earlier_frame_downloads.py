"""Host computes after a synchronisation with what an earlier frame downloads."""

from stream_programs.drawn.kit import calls, F, torch


INPUTS = "y state"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(y, state):
        current = torch.cuda.current_stream()
        v1 = buffer.relu()
        v2 = (y > 0).float()
        done1 = torch.cuda.Event()
        done1.record(current)
        v3 = state.to("cpu", non_blocking=True)
        v4 = y + 1
        with torch.cuda.stream(s1):
            done1.wait()
            v5 = v2 - y
            torch._dynamo.graph_break()
            v6 = v1.clamp(-1, 1) * v5
        v7 = v2.clone()
        v8 = F.dropout(state, 0.5)
        current.wait_stream(s1)
        y[4:20].copy_(v5[8:24])
        y.clamp_(-2, 2)
        torch.cuda.synchronize()
        v9 = v3 + 1
        return v3, v6, v7, v8, v9

    return calls(k, fn, [buffer])
