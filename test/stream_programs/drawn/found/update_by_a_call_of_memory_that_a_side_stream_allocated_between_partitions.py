"""Update by a call of memory that a side stream allocated between partitions."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "z pinned"


def build(k):
    s1 = k.stream()

    def fn(z, pinned):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(s1):
            s1.wait_stream(current)
            v1 = pinned.to("cuda", non_blocking=True)
        current.wait_stream(s1)
        v2 = torch.view_as_complex(v1.view(32, 16, 2))
        v3 = v2.index_put((torch.arange(2, device="cuda"),), z[0, :16])
        return (v3,)

    return calls(k, fn)
