"""Update of memory of another stream in an autograd function: the result was taken for memory of the side stream."""

from stream_programs.drawn.kit import F, torch, trains


INPUTS = "x y"


def build(k):
    s1 = k.stream()

    class Updated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            current = torch.cuda.current_stream()
            v1, v2 = x * 2, torch.empty_like(x)
            s1.wait_stream(current)
            with torch.cuda.stream(s1):
                F.relu(v1, inplace=True)
                torch.mul(y, 3, out=v2)
            current.wait_stream(s1)
            return v1, v2

        @staticmethod
        def backward(ctx, g1, g2):
            return g1 * 2, g2 * 3

    def fn(x, y):
        return Updated.apply(x, y)

    return trains(k, fn, 0, [])
