"""Copy that another stream reads instead of the result."""

from stream_programs.drawn.kit import calls, torch


INPUTS = "x state pinned ready"


def build(k):
    s2 = k.stream()
    s3 = k.stream()
    sleep = k.sleep

    def fn(x, state, pinned, ready):
        current = torch.cuda.current_stream()
        v3 = x * 2
        with torch.cuda.stream(s2):
            s2.wait_stream(current)
            v4 = sleep(state) + v3
            v5 = pinned.to("cuda")
            v6 = v5.clone()
            with torch.cuda.stream(s3):
                s3.wait_stream(s2)
                v7 = sleep(v6).relu()
        current.wait_stream(s2)
        current.wait_stream(s3)
        return v4, v5, v7

    return calls(k, fn)
