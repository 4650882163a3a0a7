"""View by a call (`view_as_real`) that another stream reads when its frame ends at a graph break: freed too early."""

from stream_programs.drawn.kit import calls, F, torch


INPUTS = "x y"


def build(k):
    s1 = k.stream()
    buffer = k.parameter(32, 32)

    def fn(x, y):
        current = torch.cuda.current_stream()
        v1 = torch.view_as_real(torch.complex(y, buffer))[..., 0]
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v2 = F.conv2d(v1.view(1, 1, 32, 32), torch.ones(1, 1, 3, 3, device="cuda"), padding=1).view(32, 32)
        torch._dynamo.graph_break()
        v3 = x @ y
        current.wait_stream(s1)
        return v2, v3

    return calls(k, fn)
