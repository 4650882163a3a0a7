"""Compares every relaunch with a run of the region as compiled, on copies of its inputs (`config.cudagraph_verify`),
or the first launch of a graph with operators that aren't torch's (Note [Kernels outside of a capture] of
`capture.culprit`).

Both runs draw the same random numbers. Sums that are made in no fixed order may differ in their last bits, so values
are compared with a tolerance; a pointer slot that was patched wrongly makes another kind of difference. The first
difference is raised, with the parameters that hold the address of the tensor that differs.
"""

from __future__ import annotations

import bisect
from typing import Any, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.attention_seeds import may_be_seed
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.memory.outputs import OfInput, OfStorage, Repeated, SameInput


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch, Split

    Launchable: TypeAlias = "Relaunch | Split | Verified"  # the graph of a state
    Run: TypeAlias = "tuple[Sequence[Any], Any]"  # the inputs as they are after it, and the outputs
    Difference: TypeAlias = "tuple[str, int | None, str]"  # what differs first, its region, and how

# Largest difference, relative to the largest number of the tensor.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
COARSE = 0.25  # for types of 8 bits
MOST_SLOTS = 8


class VerifyError(RuntimeError):
    """A relaunch and the compiled code disagree."""


class Verified:
    """A `Relaunch` whose results are compared with those of the compiled code at each launch."""

    try_launch = None

    def __init__(
        self,
        relaunch: Relaunch | Split,
        plain: Callable[[list[Any]], Any],
        code: CodeFacts,
        clone: Callable[..., torch.Tensor],
    ) -> None:
        self.relaunch, self.plain, self.code, self.clone = relaunch, plain, code, clone
        self.stages: Sequence[Relaunch] = relaunch.stages
        self.regions = {position: region for region, position in enumerate(relaunch.layout.inputs)}

    def launch(self, inputs: list[Any], originals: Sequence[Any] | None = None) -> tuple[Any, ...]:
        held, copies, state = list(inputs), self._copies(inputs), self._random_state(inputs)
        result = self.relaunch.launch(inputs, originals)
        self._set_random_state(held, state)
        expected = self.plain(list(copies))
        self._raise_if(self._difference((copies, expected), (held, result)))
        return result

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare a launch with a run as compiled, both on copies of these inputs: without a tolerance, if the compiled
        code has the same results each time. The launch comes first, for the other run may write what that missed."""
        state = self._random_state(inputs)

        def on_copies(run: Callable[[list[Any]], Any]) -> Run:
            copies = self._copies(inputs)
            try:
                return copies, run(list(copies))
            finally:
                self._set_random_state(inputs, state)

        got, want = on_copies(self.relaunch.launch), on_copies(self.plain)
        found = self._difference(want, got, exactly=True)
        if found is not None and self._difference(want, on_copies(self.plain), exactly=True) is not None:
            found = self._difference(want, got)
        self._raise_if(found)

    def _copies(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.clone(v) if capture.is_region(v) else v for v in inputs]

    def _random_state(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.relaunch.device.random_state(), *(g.get_state() for g in _generators(inputs))]

    def _set_random_state(self, inputs: Sequence[Any], state: Sequence[Any]) -> None:
        self.relaunch.device.set_random_state(state[0])
        for generator, before in zip(_generators(inputs), state[1:], strict=True):
            generator.set_state(before)

    def _memory(self, output: int) -> tuple[int | None, bool]:
        """Return the region of an output, and whether a node of the graph may write it: one whose memory no node holds
        an address in is uninitialized, as it is without a graph. Flash attention returns such a tensor."""
        layout = self.relaunch.layout
        match layout.recipes[output]:
            case Repeated(first):
                return self._memory(first)
            case SameInput(position) | OfInput(position, _):
                return self.regions.get(position), True
            case OfStorage(number, view):
                region, storage = len(layout.inputs) + number, layout.storages[number]
                starts = [*storage.starts, max(storage.size, 1)]
                at = bisect.bisect_right(storage.starts, view.offset) - 1
                held = range(starts[at], starts[at + 1])
                return region, any(s.region == region and s.delta in held for s in self.relaunch.template.slots)
        return None, True

    def _difference(self, want: Run, got: Run, exactly: bool = False) -> Difference | None:
        written = [k for k in self.code.mutated_inputs if capture.is_region(got[0][k])]
        pairs = [(f"input {k}, which it writes,", want[0][k], got[0][k], self.regions.get(k)) for k in written]
        for i, (a, b) in enumerate(zip(want[1], got[1], strict=True)):
            # Note [Seeds of attention]: a forward without dropout leaves its seeds unwritten.
            is_seed = may_be_seed(a) and not capture.is_region(a) and may_be_seed(b) and capture.is_region(b)
            region, may_be_written = self._memory(i)
            if may_be_written and not is_seed:
                pairs.append((f"output {i}", a, b, region))
        differences = ((what, region, describe_difference(a, b, exactly)) for what, a, b, region in pairs)
        return next(((what, region, how) for what, region, how in differences if how), None)

    def _raise_if(self, found: Difference | None) -> None:
        if found is None:
            return
        what, region, difference = found
        template = self.relaunch.template
        slots = [s for s in template.slots if s.region == region]
        lines = [f"{self.code.name}: {what} of the relaunched graph is not that of the compiled code: {difference}"]
        for slot in slots[:MOST_SLOTS]:
            kernel = template.nodes[slot.node].name
            lines.append(
                f"  its address: node {slot.node} ({kernel}), parameter {slot.parameter}, offset {slot.offset}"
            )
        if len(slots) > MOST_SLOTS:
            lines.append(f"  and {len(slots) - MOST_SLOTS} more pointer slots")
        raise VerifyError("\n".join(lines))


def _generators(inputs: Sequence[Any]) -> list[torch.Generator]:
    return [v for v in inputs if isinstance(v, torch.Generator)]


def tolerance_of(dtype: torch.dtype) -> float:
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return 0.0 if exact else TOLERANCES.get(dtype, COARSE)


def describe_difference(want: Any, got: Any, exactly: bool = False) -> str | None:
    """Return a text that says how two results differ; None if they agree, within a tolerance if not `exactly`."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if want is got or bit_key(want) == bit_key(got) else f"{got!r} instead of {want!r}"
    for attribute in ("dtype", "device", "shape"):
        if getattr(want, attribute) != getattr(got, attribute):
            return f"{attribute} {getattr(got, attribute)} instead of {getattr(want, attribute)}"
    if want.stride() != got.stride():
        return f"strides {got.stride()} instead of {want.stride()}"
    if not want.numel() or torch.equal(a := _comparable(want), b := _comparable(got)):
        return None
    if a.dtype.is_floating_point:
        tolerance = 0.0 if exactly else tolerance_of(want.dtype)
        finite = a[a.isfinite()].abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        wrong = ~torch.isclose(b, a, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    else:
        wrong = a != b
    count = int(wrong.sum())
    if not count:
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    return f"{count} of {wrong.numel()} values differ, first at {first}: {b[first].item()} instead of {a[first].item()}"


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor
