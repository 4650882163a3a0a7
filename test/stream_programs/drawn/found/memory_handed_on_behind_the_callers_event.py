"""Memory handed on after the callers event."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "ready"


def build(k):
    s1 = k.stream()

    def fn(ready):
        with torch.cuda.stream(s1):
            s1.wait_event(ready)
            v1 = torch.ones(32, 32, device="cuda")
        done1 = s1.record_event()
        done1.wait()
        return (v1,)

    return calls(k, fn)
