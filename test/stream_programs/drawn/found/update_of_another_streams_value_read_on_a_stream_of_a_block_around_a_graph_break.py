"""Update of another streams value read on a stream of a block around a graph break."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "y state ready"


def build(k):
    s1 = k.stream()
    s2 = k.stream()

    def fn(y, state, ready):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s2):
            ready.wait()
            v1 = state.relu()
            state.clamp_(-2, 2)
            v2 = state.cpu()
        v1[:, ::2].add_(y[:, ::2])
        with torch.cuda.stream(s1):
            torch._dynamo.graph_break()
            done1 = torch.cuda.Event()
            done1.record(current)
            s1.wait_event(done1)
            v3 = v1.detach().amax(1, keepdim=True)
        return v2, v3

    return calls(k, fn)
