"""Column that an update left alone."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    e1 = torch.cuda.Event()
    buffer = k.parameter(32, 32)

    def fn(state):
        current = torch.cuda.current_stream()
        v1 = buffer + state
        v2 = v1[:, 5:6]
        with torch.cuda.stream(s2):
            e1.record(current)
            s2.wait_event(e1)
            v3 = torch.ones(32, 32, device="cuda")
            v4 = torch.where(buffer > 0, buffer, state)
            with torch.cuda.stream(s1):
                e1.wait()
                v1[:, ::2].add_(state[:, ::2])
        done1 = torch.cuda.Event()
        done1.record(s1)
        current.wait_event(done1)
        done2 = s2.record_event()
        done2.wait()
        return v1, v2, v3, v4

    return calls(k, fn, [buffer])
