"""Runs one of two branches that a tensor chooses, or captures both: Note [Branches in a graph] of
`graph.conditional_nodes`.

Generated code calls `choose([predicate, *operands], false, true)`, where the branches are functions of its module.

Note [Branches that were never run]
Calls before the capture take one branch, so libraries and Triton may not have chosen kernels in the other. To run it
on other data than the program does could read outside of a tensor. So a region waits with its capture until each branch
has been run, but for no more than `MOST_WAITS` calls. A kernel of Triton's that has not been tuned by then keeps its
first configuration.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_overlay._inductor.relaunch.capture.allocations import current_observer, function_of, names_in, namespace_of
from torch_overlay._inductor.relaunch.memory.outputs import TensorView, view_of
from torch_overlay._inductor.relaunch.proof.nodes import Conditional, Unprovable
from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.capture.allocations import Placing

    Branch = Callable[[list[Any]], Sequence[Any]]


MOST_WAITS = 8
_run: weakref.WeakSet[Any] = weakref.WeakSet()  # branches that were run


def choose(args: list[Any], *branches: Branch) -> Sequence[Any]:
    """Run the branch with the number that `args` has first, on the rest of the arguments. `args` is emptied."""
    if (captured := _captured.value) is not None:
        return captured.choose(args, branches)
    predicate, *operands = args
    args.clear()
    with _disable_current_modes():  # the read is none of the region's operators
        taken = branches[int(predicate.item())]
    del predicate
    observer = current_observer()
    with observer.in_branch(taken.__name__) if observer is not None else contextlib.nullcontext():
        result = taken(operands)
    _run.add(taken)
    return result


class Branches:
    """The conditions of one capture. `placing` places the allocations of the capture."""

    def __init__(self, recording: Any, placing: Placing) -> None:
        self.recording, self.placing = recording, placing
        self.same: dict[int, int] = {}  # address of a result -> that of the result of the other branch

    def captured(self) -> contextlib.AbstractContextManager[Any]:
        """Capture both branches of what this thread chooses inside."""
        return _captured.within(self)

    def choose(self, args: list[Any], branches: Sequence[Branch]) -> Sequence[Any]:
        predicate, *operands = args
        args.clear()
        recording, found = self.recording, self.recording.conditionals
        at, nodes = len(found), [recording.nodes()]
        recording.read_predicate(predicate)
        del predicate
        nodes.append(recording.nodes())
        false, true = branches
        results = self._capture(true, list(operands), self._own)
        nodes.append(recording.nodes())
        self._capture(false, operands, functools.partial(self._put, results))
        nodes.append(recording.nodes())
        (setter,), *parts = (frozenset(now).difference(before) for before, now in itertools.pairwise(nodes))
        found.insert(at, Conditional(setter, tuple(parts)))  # before those inside
        return results

    def _capture(self, branch: Branch, operands: list[Any], finish: Callable[[list[Any]], Any]) -> Any:
        """Capture a branch, and what `finish` does with its results. Return what that returns."""
        if branch not in _run:
            _keep_first_configurations(branch)
        with self.placing.in_branch(branch.__name__):
            return finish(list(branch(operands)))

    def _own(self, results: list[Any]) -> list[Any]:
        """Return the results of the branch, each in memory that is its own."""
        seen: set[int] = set()
        for i, value in enumerate(results):
            if _has_memory(value) and not self._is_fresh(value, seen):
                results[i] = self._allocate(view_of(value)).copy_(value)
        return results

    def _put(self, first: Sequence[Any], results: Sequence[Any]) -> None:
        """Have the results of the branch lie where those of the first one do."""
        seen: set[int] = set()
        for mine, theirs in zip(results, first, strict=True):
            if not _has_memory(theirs):
                if _has_memory(mine) or type(mine) is not type(theirs):
                    raise Unprovable("condition", f"branches return {theirs!r} and {mine!r}")
            elif self._is_fresh(mine, seen) and self._layout(mine) == self._layout(theirs):
                self.same[_storage(mine)] = _storage(theirs)
            else:
                theirs.copy_(mine)

    def _is_fresh(self, value: torch.Tensor, seen: set[int]) -> bool:
        """True if generated code has allocated the tensor's memory in the branch, for this result alone."""
        address, branch = _storage(value), self.placing.branch
        kind, number = self.placing.last.get(address, ("", 0))
        is_first = address not in seen
        seen.add(address)
        is_here = isinstance(number, tuple) and number[: len(branch)] == branch
        return is_first and is_here and kind == "allocation" and value.data_ptr() == address

    def _layout(self, value: torch.Tensor) -> tuple[TensorView, int | None]:
        address, placing = _storage(value), self.placing
        return view_of(value), placing.scratch.get(address, placing.placed.get(address))

    def _allocate(self, view: TensorView) -> torch.Tensor:
        return self.placing.allocate(torch.empty_strided, view.size, view.stride, view.dtype)

    def stands_for(self, address: int) -> int:
        """Return the address of the result that the one here is, in the outermost branch."""
        while (other := self.same.get(address)) is not None:
            address = other
        return address


_captured: ThreadValue[Branches | None] = ThreadValue(None)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.numel())


def has_branches(model: Any) -> bool:
    """True if generated code chooses between branches."""
    return choose.__name__ in names_in(model) and namespace_of(model).get(choose.__name__) is choose


def branches_of(model: Any) -> list[Any]:
    """Return the functions that generated code chooses from, and those that they choose from."""
    found: dict[Any, None] = {}
    waiting, namespace = [function_of(model)] if has_branches(model) else [], namespace_of(model)
    while waiting:
        used = map(namespace.get, waiting.pop().__code__.co_names)
        own = [v for v in used if isinstance(v, types.FunctionType) and v.__globals__ is namespace and v not in found]
        found |= dict.fromkeys(own)
        waiting += own
    return list(found)


class NeverRun:
    """The branches of a region, and those that were never run (`left`)."""

    def __init__(self, model: Any) -> None:
        self.branches, self.waits = branches_of(model), MOST_WAITS
        self.left = self.branches

    def wait(self) -> bool:
        """True if the region is to wait with its capture: Note [Branches that were never run]."""
        if not self.left or not self.waits:
            return False
        self.left = [branch for branch in self.left if branch not in _run]
        self.waits -= 1
        return bool(self.left)


def _keep_first_configurations(branch: Any) -> None:
    for name in branch.__code__.co_names:
        kernel = branch.__globals__.get(name)
        if len(getattr(kernel, "launchers", None) or ()) > 1:
            kernel.launchers = kernel.launchers[:1]  # type: ignore[union-attr]
