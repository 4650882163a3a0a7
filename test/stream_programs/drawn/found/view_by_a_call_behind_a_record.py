"""View by a call (`view_as_real`) behind a record on a side stream: taken for one on that stream, without a device."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x y state pinned"


def build(k):
    side = k.stream()
    event = torch.cuda.Event()

    def fn(x, y, state, pinned):
        v1 = pinned.to("cuda")
        event.record(side)
        event.wait()
        v2 = y.clamp(-1, 1) @ state.sign()
        v3 = torch.view_as_real(torch.complex(v1, x))[..., 0]
        return v1, v2 + v1, v3

    return calls(k, fn, loads=(side, [0, 1, 2]))
