"""Upload that blocks after an update of a buffer."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state pinned"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(state, pinned):
        current = torch.cuda.current_stream()
        buffer.zero_()
        v1 = pinned.to("cuda")
        v2 = v1 + state
        v3 = torch.ones(32, 32, device="cuda")
        torch._dynamo.graph_break()
        with torch.cuda.stream(s1):
            v4 = sleep(state) + buffer
        done1 = torch.cuda.Event()
        done1.record(s1)
        current.wait_event(done1)
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
