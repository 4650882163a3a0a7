"""Result that was written over and its source is read later."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "x state"


def build(k):
    s1 = k.stream()
    w0 = weight(k)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(x, state):
        current = torch.cuda.current_stream()
        v1 = torch.ones(32, 32, device="cuda")
        v2 = sleep(buffer) @ w0
        v1.copy_(v2)
        done1 = current.record_event()
        v3 = state - v2
        with torch.cuda.stream(s1):
            done1.wait()
            v4 = x.clone()
        done2 = s1.record_event()
        done2.wait()
        return v1, v3, v4

    return calls(k, fn, [buffer])
