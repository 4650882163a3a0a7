"""Copy of what another stream reads."""

from stream_programs.drawn.kit import calls, F, torch


INPUTS = "y n"


def build(k):
    s1 = k.stream()
    s2 = k.stream()
    buffer = k.parameter(32, 32)
    sleep = k.sleep

    def fn(y, n):
        current = torch.cuda.current_stream()
        v1 = F.dropout(y, 0.5)
        with torch.cuda.stream(s2):
            v2 = v1.view(32, 32)
            with torch.cuda.stream(s1):
                s1.wait_stream(current)
                v3 = v1 + 1 if n > 0 else v1 * 2
                v4 = (v1.sum(0, keepdim=True)).clamp(-2, 2)
                v5 = sleep(buffer) * 3
            s2.wait_stream(current)
            v6 = v2.clone()
        return v3, v4, v5, v6

    return calls(k, fn, [buffer])  # unjoined
