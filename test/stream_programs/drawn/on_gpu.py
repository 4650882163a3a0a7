"""A drawn program on a GPU: compiled once, called under several draws of delays, against eager on one stream.

As in `gpu`, the caller is unfriendly: inputs are written late, side streams are busy when a call begins, results are
read at once, and dropped memory is overwritten. Delays are shorter here and drawn anew for each seed, those between
the program's own operations included, as far as no CUDA graph holds them.
"""

import random
from typing import Any

import torch

import form
from stream_programs import _ops, gpu
from stream_programs._program import Program


MODES = ("default", "reduce-overhead", "trees")
LENGTHS = (0, 0, 50_000, 200_000, 1_000_000)  # clock cycles
WARM_UP = 3  # a region runs as it is, is captured, is relaunched
CALLS = 2  # with each seed


def _expected(program: Program, calls: int) -> list[tuple[list[Any], list[Any]]]:
    """Eager keeps to one stream, which orders the calls, too."""
    eager = program.instance()
    seen = []
    for call in range(calls):
        inputs = program.make_inputs("cuda", gpu._generator(call))
        gpu._record_events(inputs)
        outputs = gpu._call(eager, inputs, call)
        if program.host_reads:
            torch.cuda.synchronize()
        seen.append(tuple([_kept(v) for v in gpu._values(tree)] for tree in (outputs, inputs)))
    return [(gpu._to_host(outputs), gpu._to_host(inputs)) for outputs, inputs in seen]


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def check_mode(program: Program, mode: str, seeds: int) -> None:
    """Raises `gpu.Mismatch` at the first difference; `mode` is one of `MODES`."""
    torch._dynamo.reset()
    bursts = [range(WARM_UP), *(range(WARM_UP + CALLS * s, WARM_UP + CALLS * (s + 1)) for s in range(seeds))]
    expected = _expected(program, bursts[-1].stop)
    graphs = {"trees": {"cudagraphs": "trees"}}.get(mode, {})
    try:
        with form.overlay.config.patch(fold_branches_below_us=0.0, **graphs):
            compiled = program.instance(program.compiler(None if mode == "default" else "reduce-overhead"), sleeps=True)
            for number, calls in enumerate(bursts):
                draw = random.Random(number)
                _ops.stretch = 0.3 if number == 0 else draw.choice((0.05, 0.2, 0.5))
                gpu.burst(compiled, calls, expected, draw, number % 3 == 2, LENGTHS)
    finally:
        torch.cuda.synchronize()
        _ops.stretch = 1.0
        torch._dynamo.reset()
