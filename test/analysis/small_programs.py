"""Random small programs as traces, for which every order can be tried out."""

import random

import form  # noqa: F401
from torch_overlay.analysis.race_check.trace import HOST, Memory, Operation, Trace, View


CELLS = 2
STREAMS = ("s0", "s1", "s2")


def draw(seed: int, size: int = 8) -> list[Operation]:
    """A program of at most `size` operations (allocations at the start aside): kernels on one to three streams, over
    two memories and parts of them, with waits, records, frees and allocations wherever they fall.

    Each memory is written in full before it is used, and is used by nobody after its free.
    """
    rng = random.Random(seed)
    trace = Trace()
    streams = STREAMS[: rng.randint(1, 3)]
    live: list[Memory] = []
    written: set[Memory] = set()
    recorded: list[str] = []
    for i in range(rng.randint(1, 2)):
        live.append(trace.alloc(f"m{i}", 8 * CELLS, on=rng.choice(streams)))
    count = len(live)

    def part(memory: Memory) -> Memory | View:
        at = rng.randrange(CELLS)
        return memory if memory not in written or rng.random() < 0.7 else memory[8 * at : 8 * at + 8]

    left = size
    while left > 0:
        left -= 1
        draw = rng.random()
        stream = rng.choice((*streams, HOST)) if rng.random() < 0.1 else rng.choice(streams)
        if draw < 0.5 and live:
            target, others = rng.choice(live), [m for m in live if m in written]
            reads = [part(m) for m in rng.sample(others, min(len(others), rng.randint(0, 2)))]
            writes: list[Memory | View] = [part(target)] if target not in written or rng.random() < 0.6 else []
            if reads or writes:
                trace.launch(f"k{left}", stream, [r for r in reads if r not in writes], writes)
                if writes:
                    written.add(target)
        elif draw < 0.64 and stream != HOST:
            recorded.append(f"e{rng.randint(0, 1)}")
            trace.record(recorded[-1], stream)
        elif draw < 0.8 and recorded and stream != HOST:
            trace.wait(rng.choice(recorded), stream)
        elif draw < 0.83:
            trace.synchronize(stream=rng.choice(streams))
        elif draw < 0.85 and recorded:
            trace.synchronize(event=rng.choice(recorded))
        elif draw < 0.87 and live and stream != HOST:
            trace.record_stream(rng.choice(live), stream)
        elif draw < 0.94 and live:
            trace.free(gone := rng.choice(live))
            live.remove(gone)
        elif len(live) < 2:
            live.append(trace.alloc(f"m{count}", 8 * CELLS, on=rng.choice(streams)))
            count += 1
    return trace.operations


__all__ = ["draw"]
