"""Copy of an input that is updated in part and read after what another stream waits for."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state"


def build(k):
    s1 = k.stream()

    def fn(x, state):
        current = torch.cuda.current_stream()
        v1 = x * 3
        state[4:20].copy_(x[8:24])
        v1.copy_(state)
        s1.wait_stream(current)
        v2 = v1.sum(0, keepdim=True)
        return (v2,)

    return calls(k, fn)
