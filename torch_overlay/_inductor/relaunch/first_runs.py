"""Runs a region as compiled, and finds out what its capture has to know: which allocations become outputs, which inputs
are seeds of attention or are freed, how far random generators advance.

The first run with some sizes is observed in full. The allocations of a further one, or of one in another thread, are
the same; which inputs are large is not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from torch_overlay._inductor.relaunch import attention_seeds
from torch_overlay._inductor.relaunch.alignment import address_of, LEAST
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import namespace_of, observed, Observer, Plan, storages, Watch


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.compiled_region import CompiledRegion

LARGE = 1 << 20  # bytes; for an input of at least this size, it is noted whether it is freed during the run


class Run(NamedTuple):
    """A run of a region as compiled, and what it showed. `seeds`: positions of inputs that are seeds of attention;
    `operators`: how many it called; `are_aligned`: whether its inputs were;
    `frees_inputs`: whether it is a backward that frees any."""

    result: Any
    plan: Plan
    frees_inputs: bool
    seeds: frozenset[int] = frozenset()
    operators: int = 0
    are_aligned: bool = True


class _Held:
    """The storages of a region's inputs, before a run that may free them."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        tensors = [(k, v) for k, v in enumerate(inputs) if address_of(v)]
        self._refs = {k: StorageWeakRef(v.untyped_storage()) for k, v in tensors}
        self._large = [k for k, v in tensors if v.untyped_storage().nbytes() >= LARGE]

    def are_freed(self) -> bool:
        return any(ref.expired() for ref in self._refs.values())

    def freed_large(self) -> frozenset[int]:
        return frozenset([k for k in self._large if self._refs[k].expired()])


class FirstRuns:
    """Runs a region without a graph."""

    def __init__(self, region: CompiledRegion) -> None:
        self.region, self.device, self.is_backward = region, region.device, region.code.is_backward

    def run(self, inputs: list[Any]) -> Any:
        return self.region.run("warm-up", inputs)

    def observe(self, inputs: list[Any]) -> Run:
        given, generators = storages(inputs), self.device.generators(inputs)
        held = _Held(inputs)
        are_aligned = not any(address_of(v) % LEAST for v in inputs)
        drawn = [g.get_offset() for g in generators]
        at = {v.data_ptr(): k for k, v in enumerate(inputs) if attention_seeds.may_be_seed(v)}
        observer = Observer()
        namespace = namespace_of(self.region.model)
        watch = Watch(observer, lambda number, call: call(), tuned_in=namespace)
        with observed(namespace, observer), attention_seeds.noted() as noted, watch:
            result = self.run(inputs)
        made = storages([v for v in result if capture.is_region(v)] if isinstance(result, (list, tuple)) else result)
        # An input may have been freed by now, and the region may have allocated at its address.
        fresh = [address for address in made if address not in given or address in observer.last]
        plan = observer.plan(fresh, self._with_run(Plan(), held, generators, drawn))
        seeds = frozenset([at[address] for address in noted & at.keys()])
        return Run(result, plan, self._frees(held), seeds, watch.count, are_aligned)

    def repeat(self, inputs: list[Any], known: Plan) -> Run:
        """Run a region of which an observed run has shown `known`."""
        generators, held = self.device.generators(inputs), _Held(inputs)
        drawn = [g.get_offset() for g in generators]
        result = self.run(inputs)
        return Run(result, self._with_run(known, held, generators, drawn), self._frees(held))

    def _frees(self, held: _Held) -> bool:
        return self.is_backward and held.are_freed()

    def _with_run(self, plan: Plan, held: _Held, generators: Sequence[Any], drawn: Sequence[int]) -> Plan:
        """Add to a plan which inputs a run has freed, and how far it advanced the generators from `drawn`."""
        dying = held.freed_large()
        advance = tuple([g.get_offset() - before for g, before in zip(generators, drawn)])
        return dataclasses.replace(
            plan,
            dying=dying,
            detail=self.is_backward and bool(dying),
            random=any(advance),
            drawn=advance if any(advance) else (),
        )
