"""Runs a program on a GPU as an unfriendly caller would, and compares it with ordered eager.

The oracle is the program in eager, with the whole device synchronised before it and after it: streams of the pool
don't wait for the default stream, so without that the oracle itself could race. The compiled program runs without any
such help, in bursts of calls:

- its inputs are written late, on the current stream, after a delay; until then the memory holds values that no
  program computes;
- each of its side streams is busy for a while when the call begins, each call another one for another time;
- outputs and mutated inputs are read at once on the current stream, after nothing but the program's own `finish`;
- then the caller drops everything, allocates as much again, and overwrites it, on other streams, too, if the results
  are to be memory of the stream that reads them (`Program.late_reader`).

Half of the bursts run with another current stream than the default one.
"""

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from stream_programs._program import Inputs, Instance, Program


DELAYS = (0, 0, 200_000, 1_000_000, 3_000_000)  # clock cycles; a million is about half a millisecond
BURST = 5


class Mismatch(AssertionError):
    pass


@dataclasses.dataclass
class _Call:
    """One call: what it is given, and what an observer saw of it, on the host."""

    seed: int
    inputs: Inputs
    seen: list[Any] = dataclasses.field(default_factory=list)
    after: list[Any] = dataclasses.field(default_factory=list)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _values(tree: Any) -> list[Any]:
    """What can be compared: no streams, no events."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, (torch.Tensor, bool, int, float))]


def _poison(tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0 if tensor.dtype is torch.int64 else 77)


def _empty_twin(source: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of the same layout, misalignment included; a view if the source is one."""
    count = source.untyped_storage().nbytes() // source.element_size()
    base = torch.empty(count, dtype=source.dtype, device=source.device)
    size, stride, offset = source.size(), source.stride(), source.storage_offset()
    if source._is_view():
        return base.as_strided(size, stride, offset)
    return torch.empty(0, dtype=source.dtype, device=source.device).set_(base.untyped_storage(), offset, size, stride)


def _record_events(inputs: Inputs) -> None:
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Event):
            leaf.record()


def _call(instance: Instance, inputs: Inputs, seed: int) -> Any:
    if instance.program.random:
        torch.cuda.manual_seed(seed)
    return instance.finish(inputs, instance.fn(*inputs))


def _expect(instance: Instance, seed: int) -> tuple[list[Any], list[Any]]:
    inputs = instance.program.make_inputs("cuda", _generator(seed))
    _record_events(inputs)
    torch.cuda.synchronize()
    outputs = _call(instance, inputs, seed)
    torch.cuda.synchronize()
    return _to_host(_values(outputs)), _to_host(_values(inputs))


def _to_host(values: list[Any]) -> list[Any]:
    return [v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for v in values]


def _prepare(program: Program, seed: int) -> tuple[_Call, list[tuple[torch.Tensor, torch.Tensor]]]:
    sources = program.make_inputs("cuda", _generator(seed))
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def twin(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.is_cuda):
            return leaf
        late.append((_empty_twin(leaf), leaf))
        if leaf.numel():
            late[-1][0].copy_(leaf)
            _poison(late[-1][0])
        return late[-1][0]

    return _Call(seed, pytree.tree_map(twin, sources)), late


def _other_current_stream(use: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream() if use else None)


def _sleep(stream: torch.Stream, cycles: int) -> None:
    if cycles:
        with torch.cuda.stream(
            torch.cuda.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1)
        ):
            torch.cuda._sleep(cycles)


def _run_late(instance: Instance, call: _Call, late: list[Any], delays: random.Random, lengths: Sequence[int]) -> None:
    current = torch.cuda.current_stream()
    _sleep(current, delays.choice(lengths))
    for target, source in late:
        target.copy_(source)
    _record_events(call.inputs)
    given = [leaf for leaf in pytree.tree_leaves(call.inputs) if isinstance(leaf, torch.Stream)]
    for stream in (*instance.streams, *given):
        _sleep(stream, delays.choice(lengths))
    torch.compiler.cudagraph_mark_step_begin()
    outputs = _call(instance, call.inputs, call.seed)
    late_reader = instance.program.late_reader
    reader = instance.streams[0] if late_reader == "side" else current
    if late_reader:
        _sleep(reader, max(lengths))
    with torch.cuda.stream(reader):
        call.seen = [v.clone() if isinstance(v, torch.Tensor) else v for v in _values(outputs)]
    _sleep(current, delays.choice(lengths))
    sizes = [torch.empty_like(t, device="meta") for t in (*_tensors(outputs), *_tensors(call.inputs)) if t.is_cuda]
    del outputs
    for stream in (current, *(instance.streams if late_reader else ())):
        with torch.cuda.stream(stream):
            for shape in sizes:
                _poison(torch.empty_like(shape, device="cuda"))
    if late_reader:
        torch.cuda.synchronize()  # what is overwritten now is the next call's


def burst(
    compiled: Instance,
    seeds: Sequence[int],
    expected: Any,
    delays: random.Random,
    other_stream: bool,
    lengths: Sequence[int] = DELAYS,
) -> None:
    """Calls with these seeds, of which `expected` has outputs and inputs afterwards."""
    program = compiled.program
    prepared = [_prepare(program, seed) for seed in seeds]
    torch.cuda.synchronize()
    with _other_current_stream(other_stream):
        for call, late in prepared:
            _run_late(compiled, call, late, delays, lengths)
    torch.cuda.synchronize()
    for call, _ in prepared:
        outputs, after = expected[call.seed]
        _compare(program, f"call {call.seed}, output", outputs, _to_host(call.seen))
        _compare(program, f"call {call.seed}, input afterwards", after, _to_host(_values(call.inputs)))


def _compare(program: Program, what: str, expected: list[Any], got: list[Any]) -> None:
    if len(expected) != len(got):
        raise Mismatch(f"{what}: {len(got)} values, expected {len(expected)}")
    for index, (want, have) in enumerate(zip(expected, got)):
        if not isinstance(want, torch.Tensor):
            if want != have:
                raise Mismatch(f"{what} {index}: {have!r}, expected {want!r}")
            continue
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            raise Mismatch(f"{what} {index}: {have.dtype}{[*have.shape]}, expected {want.dtype}{[*want.shape]}")
        close = torch.isclose(have, want, rtol=program.tolerance, atol=program.tolerance, equal_nan=True)
        if not close.all():
            wrong = (~close).nonzero()
            at = tuple(wrong[0].tolist())
            raise Mismatch(
                f"{what} {index}: {len(wrong)} of {want.numel()} elements differ, first at {at}: "
                f"{have[at].item()}, expected {want[at].item()}"
            )


def check(program: Program, mode: str | None, *, sleeps: bool = False, calls: int = 50, seed: int = 0) -> None:
    """Run `calls` calls of the compiled program, with the delays that `seed` draws; raise at the first difference from
    ordered eager.
    """
    torch._dynamo.reset()
    eager = program.instance()
    compiled = program.instance(program.compiler(mode), sleeps)
    torch.cuda.synchronize()
    try:
        for number, start in enumerate(range(0, calls, BURST)):
            seeds, delays = list(range(start, min(start + BURST, calls))), random.Random(100_000 * seed + start)
            expected = {seed: _expect(eager, seed) for seed in seeds}
            burst(compiled, seeds, expected, delays, other_stream=number % 2 == 1)
    finally:
        torch.cuda.synchronize()
        torch._dynamo.reset()


def devices() -> int:
    """How many GPUs the programs may use; 0 without a driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
