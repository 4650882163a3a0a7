"""Runs the operators of a region in a capture, and finds out what they allocate.

To ask the allocator how much an operator has allocated takes longer than to run it. An operator that was run before
with the same sizes, strides, types, alignments and numbers allocates as much, if the segments are those of then. A
segment has 2 or 20 MiB, so it alone doesn't tell: libraries choose kernels, and their workspaces, by alignment, too.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.allocations import tensors
from torch_overlay._inductor.relaunch.exact import exact
from torch_overlay._inductor.relaunch.memory.packing import aligned


if TYPE_CHECKING:
    import functools
    from collections.abc import Callable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.allocations import Plan
    from torch_overlay._inductor.relaunch.capture.placing import Placing

FULL = 256  # no library checks for more alignment
PLAIN = int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout
GROUP = 16  # operators, at least, whose memory is freed together: torch.cuda.memory_stats lists each pool for ever


class _Group:
    def __init__(self) -> None:
        self.pool: Any = None
        self.calls = 0
        self.addresses: list[int] = []


class Operators:
    """Operators of one capture. Their memory goes where `placing` has that of generated code. A context manager: at its
    end, no pool of theirs is selected."""

    def __init__(self, plan: Plan, recording: Any, placing: Placing) -> None:
        self.plan, self.recording, self.placing = plan, recording, placing
        self.are_wanted = bool(plan.watch or plan.operators or plan.detail)
        self.asked = dict(plan.asked)
        self._before: dict[Any, tuple[int, int, list[int]]] = {}  # key -> allocations, bytes, those of the segments
        self.group = _Group()
        self.leaves: Any = None  # a pool
        self.selected = contextlib.ExitStack()

    def __enter__(self) -> Operators:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.selected.close()

    def run(self, number: int | None, call: functools.partial[Any]) -> Any:
        """Run an operator. `number` is None if it returns nothing new. An operator of the plan allocates in a pool of
        its own. With `plan.detail`, so does every operator with a number: memory of a result lives as long as the
        result, other memory only as long as the operator runs."""
        if not self.are_wanted:
            return call()
        lives, planned = self.placing.lives, number in self.plan.operators
        lives.tick()
        if number is None or not (planned or self.plan.detail):
            return self._in_group(call) if self.plan.detail else call()
        asked = self.plan.asked.get(number)
        key = _key(*call.args) if asked is None else None
        before = self._before.get(key) if key is not None else None
        with self.recording.apart(before[:2] if before is not None else asked) as apart:
            result = call()
        sizes = sorted(apart.segments.values())
        if before is not None and sizes != before[2]:
            apart.count, apart.requested = -1, sum(sizes)  # at most
        elif before is None and key is not None:
            self._before[key] = apart.count, apart.requested, sizes
        if apart.segments:
            self.asked[number] = apart.count, apart.requested
        results = {t.untyped_storage().data_ptr(): t for t in tensors(result)}
        made = {a: results[a].untyped_storage().nbytes() for a in apart.segments if a in results}
        temporary = aligned(apart.requested - sum(made.values()))
        for address, size in apart.segments.items():
            # If an address was used twice, the second allocation there may be the smaller one.
            least = made.get(address, temporary)
            bytes = min(size, least if apart.once else max(least, temporary))
            (self.placing.placed if planned and address in made else self.placing.scratch)[address] = bytes
            if address in made:
                lives.begin(results[address])
            else:
                lives.note(address)
        return result

    def run_leaf(self, call: functools.partial[Any], apart: bool = False) -> Any:
        """Run an operator that returns nothing new, and calls no other: no dispatch mode has to see it. `apart`: where
        it has memory, no result of an operator may lie, now or later."""
        with self.recording.without_modes():
            if not apart or self.plan.detail:  # no group has results
                return self.run(None, call)
            self.leaves = self.leaves or self.recording.new_pool()
            with self.recording.within(self.leaves):
                return self.run(None, call)

    def leave_out(self) -> int:
        """Let the time pass of an operator that is not run. Return the time."""
        lives = self.placing.lives
        if self.are_wanted:
            lives.tick()
        return lives.now

    def _in_group(self, call: functools.partial[Any]) -> Any:
        """Run an operator that returns nothing new, in a pool that it shares with others. They keep no memory: what
        they allocate, mostly workspaces of matrix products, counts as freed when the last one has run."""
        group, recording = self.group, self.recording
        if group.calls >= GROUP and group.addresses:
            self.end_group()
            group = self.group
        if group.pool is None:
            group.pool = recording.new_pool()
        if not group.calls or group.addresses:
            self.selected.enter_context(recording.within(group.pool))
        group.calls += 1
        before = recording.allocations_made()
        result = call()
        if recording.allocations_made() != before:
            made = [address for address, _ in recording.allocations(before)]
            self.placing.lives.made |= dict.fromkeys(made, self.placing.lives.now)
            group.addresses += made
        if group.addresses:  # nobody else may get memory that one of them has freed
            self.selected.close()
        return result

    def end_group(self) -> None:
        """Note that the memory of the group's operators is freed now."""
        self.selected.close()
        lives = self.placing.lives
        for address in self.group.addresses:
            lives.freed[address] = lives.now + 1
        self.group = _Group()


def _key(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key that calls of an operator have in common if they allocate as much; None if that is not known."""
    parts: list[Any] = [function, *kwargs]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            parts.append((value.size(), value.stride(), value.dtype, value.data_ptr() % FULL))
        elif isinstance(value, PLAIN) or (
            isinstance(value, (list, tuple)) and all(isinstance(v, PLAIN) for v in value)
        ):
            parts.append(exact(value))
        else:
            return None
    return tuple(parts)
