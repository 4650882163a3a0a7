"""Input that was copied to another is read in its place on another stream."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state pinned"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    sleep = k.sleep

    def fn(y, state, pinned):
        current = torch.cuda.current_stream()
        v1 = state.view(32, 32)
        y[4:20].copy_(state[8:24])
        v2 = pinned.to("cuda", non_blocking=True)
        state.copy_(y)
        done1 = current.record_event()
        with torch.cuda.stream(s1):
            done1.wait()
            v5 = v2.clamp(-1, 1) @ v1.sign()
            with torch.cuda.stream(s2):
                done2 = torch.cuda.Event()
                done2.record(current)
                s2.wait_event(done2)
                v6 = sleep(y) + state
        done3 = torch.cuda.Event()
        done3.record(s1)
        current.wait_event(done3)
        current.wait_stream(s2)
        return v5, v6

    return calls(k, fn)
