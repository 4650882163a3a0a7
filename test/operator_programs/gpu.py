"""Runs a case on a GPU and compares it with eager, which runs it on one stream in order.

The caller is unfriendly: memory holds NaN before, inputs are written late in every other call and the side stream is
busy in the others, results are read at once by the current stream and, without a wait, by the side stream if that has
made them, and are kept until the last call is over; what is free on the side stream is overwritten there. The last
call's inputs and tangents are misaligned, of the variant `misaligned` those of more.

With `compiled=False` eager itself is held to the same, and with `streams=False` the compiled program without its
streams. On a CPU there are no streams.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from operator_programs import build, Case, FOLDED, GRAPHS, NoSample, sample, VARIANTS


CALLS = 5
LATE = 400_000  # clock cycles
EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
# Results from this one on have no defined elements: a flash attention without dropout writes no state of a generator.
UNDEFINED = dict.fromkeys(EMPTY, 0) | {"torch.ops.aten._flash_attention_forward": 2}


SIDE, CURRENT, GRADIENT, INPUT = "result", "result on the current stream", "gradient", "input"


class Mismatch(AssertionError):
    pass


class Unfit(Exception):
    """The case can't be asked."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _values(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, (torch.Tensor, bool, int, float, complex))]


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _on_host(values: Sequence[Any]) -> list[Any]:
    return [v.detach().resolve_conj().resolve_neg().cpu() if isinstance(v, torch.Tensor) else v for v in values]


def _fill(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(1)


def _twin(source: torch.Tensor, misaligned: bool) -> torch.Tensor:
    """Memory of the same layout, without the numbers, in a storage of its own."""
    if source.layout is not torch.strided:
        raise Unfit("an input isn't strided")
    last = sum((n - 1) * s for n, s in zip(source.shape, source.stride())) if source.numel() else -1
    memory = torch.empty(last + 1 + misaligned, dtype=source.dtype, device=source.device)
    offset = int(misaligned)
    view = memory.as_strided(source.shape, source.stride(), offset)
    with torch.no_grad():
        _fill(memory)
    return view.detach().requires_grad_(source.requires_grad)


class Device:
    """The streams of a run: those of a GPU, or none."""

    def __init__(self, kind: str) -> None:
        self.kind, self.is_gpu = kind, kind == "cuda"
        self.side = torch.cuda.Stream() if self.is_gpu else None

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self.is_gpu else contextlib.nullcontext()

    def late(self, stream: Any) -> None:
        if self.is_gpu:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LATE)

    def poison(self) -> None:
        """Leave NaN in the memory that will be allocated next, on both streams, in the allocator and in the driver."""
        if not self.is_gpu:
            return
        for returned in (True, False):
            for stream in (torch.cuda.current_stream(), self.side):
                with torch.cuda.stream(stream):
                    kept = [torch.full((n,), float("nan"), device="cuda") for n in (5 << 20, *[3000] * 150)]
                    del kept
            torch.cuda.synchronize()
            if returned:
                torch.cuda.empty_cache()


def is_misaligned(case: Case, number: int) -> bool:
    return number >= (2 if case.variant == "misaligned" else CALLS - 1)


def _call(case: Case, program: Callable[..., Any], given: Any, number: int) -> dict[str, list[Any]]:
    args, kwargs = given
    if not VARIANTS[case.variant].trains:
        on_side, on_current = program(args, kwargs)
        return {SIDE: _values(on_side), CURRENT: _values(on_current)}
    results = _values(program(args, kwargs))
    roots = [t for t in _tensors(results) if t.requires_grad]
    leaves = [t for t in _tensors((args, kwargs)) if t.requires_grad]
    if not roots or not leaves:
        raise Unfit("nothing to differentiate")
    tangents = [_tangent(t, is_misaligned(case, number)) for t in roots]
    found = torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
    return {CURRENT: results, GRADIENT: [g for g in found if g is not None]}


def _tangent(root: torch.Tensor, misaligned: bool) -> torch.Tensor:
    values = torch.arange(root.numel() + misaligned, device=root.device).remainder(7).add(1).div(4).to(root.dtype)
    return values[int(misaligned) :].view(root.shape)


class Expected:
    """Eager in order: what it gives, and by how much it differs from itself."""

    def __init__(self, case: Case, device: Device) -> None:
        self.case, self.device = case, device
        self.program = build(case, None)
        self.inputs = [sample(case, device.kind, seed) for seed in range(CALLS)]
        flat, self.structure = pytree.tree_flatten(self.inputs[0])
        layout = self._layout(flat)
        for number, given in enumerate(self.inputs):
            others, structure = pytree.tree_flatten(given)
            if structure != self.structure or self._layout(others) != layout:
                self.inputs[number] = self.inputs[0]  # of another seed come other sizes
            else:
                mixed = [o if isinstance(o, torch.Tensor) else f for o, f in zip(others, flat)]
                self.inputs[number] = pytree.tree_unflatten(mixed, structure)
        self.values = [self.run(number) for number in range(CALLS)]

    @staticmethod
    def _layout(flat: Sequence[Any]) -> list[Any]:
        return [(t.shape, t.dtype, t.stride()) if isinstance(t, torch.Tensor) else None for t in flat]

    def twins(self, number: int) -> Any:
        misaligned = is_misaligned(self.case, number)
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: _twin(t, misaligned) if t.device.type == self.device.kind else t,
            self.inputs[number],
        )

    def write(self, number: int, twins: Any) -> None:
        with torch.no_grad():
            for target, source in zip(_tensors(twins), _tensors(self.inputs[number])):
                if target is not source:
                    target.copy_(source)

    def run(self, number: int) -> dict[str, list[Any]]:
        given = self.twins(number)
        self.write(number, given)
        torch.manual_seed(number)
        found = _call(self.case, self.program, given, number)
        self.device.synchronize()
        return {what: _on_host(v) for what, v in (found | {INPUT: _values(given)}).items()}

    def compare(self, number: int, what: str, got: Sequence[Any]) -> None:
        want = self.values[number][what.partition(",")[0]]
        if len(got) != len(want):
            raise Mismatch(f"call {number}, {what}: {len(got)} values, eager has {len(want)}")
        for index, (a, b) in enumerate(zip(got, want)):
            if text := difference(a, b, undefined=index >= UNDEFINED.get(self.case.operator, len(want))):
                again = self.run(number)[what.partition(",")[0]]
                if difference(again[index], b, False):
                    raise Unfit("eager differs from itself")
                how = ", misaligned" if is_misaligned(self.case, number) else ""
                raise Mismatch(f"call {number}{how}, {what} {index}: {text}")


TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


def difference(got: Any, want: Any, undefined: bool) -> str:
    """In words; empty if there is none."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if got == want or (got != got and want != want) else f"{got!r}, expected {want!r}"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype}{[*got.shape]}, expected {want.dtype}{[*want.shape]}"
    if undefined or not want.numel():
        return ""
    if got.layout is not torch.strided or want.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    tolerance = TOLERANCE.get(want.dtype, 1e-3)
    kind = torch.complex128 if want.is_complex() else torch.float64
    got, want = got.to(kind), want.to(kind)
    finite = want[want.isfinite()].abs()
    scale = max(1.0, finite.mean().item()) if finite.numel() else 1.0
    close = torch.isclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if close.all():
        return ""
    wrong = (~close).nonzero()
    at = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {want.numel()} elements differ, first at {at}: {got[at].item()}, expected {want[at].item()}"
    )


def _options(case: Case) -> dict[str, Any]:
    graphs = torch._inductor.list_mode_options("reduce-overhead") if case.mode in (GRAPHS, FOLDED) else {}
    return {**graphs, "fallback_random": True}


def check(case: Case, kind: str = "cuda", *, compiled: bool = True, streams: bool = True, config: Any = None) -> None:
    """Raise `Mismatch` if the case differs from eager, and `Unfit` if it can't be asked. `config` is the overlay's."""
    torch._dynamo.reset()
    device = Device(kind)
    device.poison()
    try:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = Expected(case, device)
        except NoSample as e:
            raise Unfit(str(e)) from None
        except Unfit:
            raise
        except Exception as e:
            raise Unfit(f"eager: {type(e).__name__}: {e}") from None
        program = build(case, device.side if streams else None)
        if compiled:
            program = torch.compile(program, options=_options(case))
        folding = contextlib.nullcontext()
        if config is not None and case.mode != FOLDED:
            folding = config.patch(fold_branches_below_us=0.0)
        device.poison()
        with folding:
            _run(case, device, expected, program, reads=streams and device.is_gpu)
    finally:
        device.synchronize()
        torch._dynamo.reset()


def _run(case: Case, device: Device, expected: Expected, program: Any, reads: bool) -> None:
    current = torch.cuda.current_stream() if device.is_gpu else None
    given = [expected.twins(number) for number in range(CALLS)]
    kept: list[dict[str, list[Any]]] = []
    device.synchronize()
    for number, inputs in enumerate(given):
        device.late(device.side if number % 2 else current)
        expected.write(number, inputs)
        torch.manual_seed(number)
        found = _call(case, program, inputs, number)
        seen = dict(found)
        if reads and SIDE in found:
            with device.on(device.side):
                for value in _tensors(list(found.values())):  # whatever is free there is the side stream's
                    _fill(torch.empty(value.shape, dtype=value.dtype, device=device.kind))
                seen[f"{SIDE}, read by the side stream"] = [_plain(v) for v in found[SIDE]]
        for what in found:
            seen[f"{what}, read at once"] = [_plain(v) for v in found[what]]
        kept.append(seen)
    device.synchronize()
    for number, seen in enumerate(kept):
        # At once first: what is wrong there is wrong in what was kept, too.
        for what in sorted(seen, key=lambda w: ("," not in w, w)):
            expected.compare(number, what, _on_host(seen[what]))
        expected.compare(number, INPUT, _on_host(_values(given[number])))


__all__ = ["check", "difference", "Mismatch", "Unfit"]
