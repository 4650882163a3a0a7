"""Frame that only waits and computes nothing that is read."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "state ready"


def build(k):
    s1 = k.stream()

    def fn(state, ready):
        with torch.cuda.stream(s1):
            ready.wait()
            v1 = state.amax(1, keepdim=True)
            torch._dynamo.graph_break()
            v2 = state + 1
        torch.cuda.current_stream().wait_stream(s1)
        return (v2,)

    return calls(k, fn)
