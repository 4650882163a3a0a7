"""Copy that is returned and its source is read after a copy that blocks."""

from stream_programs.drawn.kit import calls, torch, weight


INPUTS = "y state pinned ready n"


def build(k):
    s4 = k.stream()
    s5 = k.stream()
    w1 = weight(k)
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(y, state, pinned, ready, n):
        current = torch.cuda.current_stream()
        v1 = sleep(y) @ w1
        with torch.cuda.stream(s4):
            s4.wait_event(ready)
            v2 = state.detach().clone()
            for _ in range(n):
                v2 = v2.clamp(-2, 2) + 1
            done1 = current.record_event()
            with torch.cuda.stream(s5):
                v3 = y[:, 1:]
                done1.wait()
                v4 = v1.clone()
                v5 = pinned.to("cuda")
                v6 = sleep(v1) + v5
        current.wait_stream(s4)
        done2 = s5.record_event()
        done2.wait()
        return v3, v4, v5, v6

    return calls(k, fn, [buffer])
