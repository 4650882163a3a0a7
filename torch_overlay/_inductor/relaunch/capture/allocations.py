"""Gives each allocation of a region addresses of its own in a capture, notes its life, and finds out which of them
become outputs.

Generated code allocates by a function among its module's globals. An `AllocationObserver` numbers the calls of this
function by a thread that runs a region; the numbers are the same in every run with the same shapes. If a region needs
it, a dispatch mode (`Watch`) numbers the calls of operators, and notes the storages that they allocate.

To ask the allocator how much an operator has allocated takes longer than to run it. An operator that was run before
with the same sizes, strides, types, alignments and numbers allocates as much, if the segments are those of then. A
segment has 2 or 20 MiB, so it alone doesn't tell: libraries choose kernels, and their workspaces, by alignment, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch.graph.concurrency import is_product, Product
from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.memory.outputs import TensorView
from torch_overlay._inductor.relaunch.memory.packing import aligned, Life
from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType


ALLOCATOR = "empty_strided_cuda"
# Namespaces of operators that launch on the current stream, or on streams that a capture exchanges.
TORCHS = "aten prims prim inductor quantized profiler rngprims ao higher_order"
Numbered: TypeAlias = "int | tuple[str | int, ...]"  # a number, after the names of the branches that it is in
OURS = frozenset([*TORCHS.split(), "streams", "streams_offload"])
TUNING = "torch._inductor.runtime.triton_heuristics"


@dataclass(frozen=True)
class AllocationPlan:
    """Allocations that get memory of their own in a capture: numbers of generated code's allocations, and numbers of
    operators that allocate inside. With them, the other facts that a run showed of the region."""

    allocations: frozenset[Numbered] = frozenset()
    operators: frozenset[Numbered] = frozenset()
    watch: bool = False  # there are outputs that generated code didn't allocate
    random: bool = False  # the region draws random numbers
    dying: frozenset[int] = frozenset()  # positions of inputs that are freed by the end of the region's run
    asked: Mapping[Numbered, tuple[int, int]] = field(
        default_factory=dict
    )  # operator -> allocations, bytes of a capture
    opaque: bool = False  # operators are called that are not torch's

    @property
    def detail(self) -> bool:
        """True if the lives of allocations inside operators are noted, too."""
        return bool(self.dying)


class AllocationObserver:
    """An observer of one run: numbers the run's allocations and operators, and keeps the last one at each address."""

    def __init__(self) -> None:
        self.branch: tuple[str, ...] = ()  # the names of the branches that the run is in
        self.count = self.makers = 0  # of allocations, and of operators that may return new tensors
        self.opaque = False
        self.last: dict[int, tuple[str, Numbered]] = {}

    @contextlib.contextmanager
    def in_branch(self, name: str) -> Iterator[None]:
        """Number apart what a branch allocates: a run takes one of the branches, a capture takes both."""
        before = self.branch, self.count, self.makers
        self.branch = *self.branch, name
        try:
            yield
        finally:
            self.branch, self.count, self.makers = before

    def numbered(self, count: int) -> Numbered:
        return (*self.branch, count) if self.branch else count

    def allocate(self, original: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        made = original(*args)
        self.note(made.data_ptr())
        return made

    def note(self, address: int) -> None:
        self.last[address] = ("allocation", self.numbered(self.count))
        self.count += 1

    def run(self, number: Numbered | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. `number` counts those that may return new tensors; it is None for others."""
        return func(*args, **kwargs)

    def note_results(self, number: Numbered, made: Mapping[int, int]) -> None:
        """Note the new storages of operator `number`. `made`: address -> size."""
        self.last |= dict.fromkeys(made, ("operator", number))

    def learned(self, addresses: Iterable[int], base: AllocationPlan) -> AllocationPlan:
        """Return `base` with the allocations at these addresses added. If one is unknown, the next capture has to watch
        the operators."""
        found = [self.last.get(address) for address in addresses]
        return dataclasses.replace(
            base,
            allocations=base.allocations | {f[1] for f in found if f is not None and f[0] == "allocation"},
            operators=base.operators | {f[1] for f in found if f is not None and f[0] == "operator"},
            watch=base.watch or None in found,
            opaque=base.opaque or self.opaque,
        )


class Lives:
    """The times at which the program allocated and freed the memory at each address. The clock counts allocations of
    generated code, and operators where they are watched."""

    def __init__(self) -> None:
        self.now = 0
        self.made: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._is_gone: Any = torch.UntypedStorage._expired
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._maybe: list[int] = []  # addresses of tensors that are deleted; their storages may be freed

    def begin(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        self.made[address] = self.now
        self._storages[address] = StorageWeakRef(tensor.untyped_storage())
        maybe = self._maybe
        self._tensors.append(weakref.ref(tensor, lambda _: maybe.append(address)))

    def tick(self) -> None:
        """Advance the clock just before an allocation. Memory found freed now was freed after the previous allocation
        and before this one."""
        self.now += 1
        if self._maybe:
            waiting, self._maybe[:] = list(self._maybe), []
            is_gone, storages, stays = self._is_gone, self._storages, self._maybe.append
            for address in waiting:
                if is_gone(storages[address].cdata):
                    self.freed[address] = self.now
                else:
                    stays(address)

    def note(self, addresses: Iterable[int]) -> None:
        """Note allocations that are not checked for being freed: what the region returns, or what `end` ends."""
        self.made |= dict.fromkeys(addresses, self.now)

    def end(self, addresses: Iterable[int]) -> None:
        """Note that memory is freed now, before the next allocation."""
        self.freed |= dict.fromkeys(addresses, self.now + 1)

    def life(self, address: int, size: int) -> Life:
        return Life(size, self.made.get(address, 0), self.freed.get(address))

    def remaining(self) -> list[int]:
        """Return the addresses of storages that still exist."""
        return [address for address, storage in self._storages.items() if not storage.expired()]


_observer: ThreadValue[AllocationObserver | None] = ThreadValue(None)
_hooks: dict[int, tuple[int, Any]] = {}  # by module: users, and the function that was there
_hooks_lock = threading.RLock()  # a finalizer may come here while it is held


def current_observer() -> AllocationObserver | None:
    """Return the observer of the region that this thread runs, if there is one."""
    return _observer.value


@contextlib.contextmanager
def observed(namespace: dict[str, Any], observer: AllocationObserver) -> Iterator[None]:
    """Route the allocations of this thread in the generated module with these globals through the observer."""
    if ALLOCATOR not in namespace:
        yield
        return
    with _hooks_lock:
        users, original = _hooks.get(id(namespace), (0, namespace[ALLOCATOR]))
        if not users:
            namespace[ALLOCATOR] = _hook(original)
        _hooks[id(namespace)] = users + 1, original
    try:
        with _observer.within(observer):
            yield
    finally:
        with _hooks_lock:
            users, original = _hooks.pop(id(namespace))
            if users > 1:
                _hooks[id(namespace)] = users - 1, original
            else:
                namespace[ALLOCATOR] = original


def _hook(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate(*args: Any) -> torch.Tensor:
        observer = _observer.value
        return original(*args) if observer is None else observer.allocate(original, *args)

    return allocate


def function_of(model: Any) -> Any:
    """Return the function that a compiled function is made of; None if it is of another kind."""
    while model is not None and not hasattr(model, "__globals__"):
        model = getattr(model, "__func__", None) or getattr(model, "func", None)
    return model


def namespace_of(model: Any) -> dict[str, Any]:
    """Return the globals of the generated module that a compiled function belongs to."""
    return getattr(function_of(model), "__globals__", {})


def names_in(model: Any) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of a compiled function."""
    function = function_of(model)
    return function.__code__.co_names if function is not None else ()


class Watch(TorchDispatchMode):
    """A dispatch mode that numbers the operators of a region that may make something, and notes what they made. If the
    globals of the generated module are given (`tuned_in`), operators that are called while a kernel is tuned are left
    out: no later run has them."""

    supports_higher_order_operators = True

    def __init__(self, observer: AllocationObserver, tuned_in: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.observer, self.tuned_in = observer, tuned_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, observer = kwargs or {}, self.observer
        if self.tuned_in is not None and _is_tuning(sys._getframe(1), self.tuned_in):
            return func(*args, **kwargs)
        observer.opaque |= getattr(func, "namespace", "") not in OURS
        if not _makes(func):
            return observer.run(None, func, args, kwargs)
        number = observer.numbered(observer.makers)
        observer.makers += 1
        given = storages((args, kwargs))
        result = observer.run(number, func, args, kwargs)
        made = storages(result)
        observer.note_results(number, {address: made[address] for address in made.keys() - given.keys()})
        return result


@functools.cache
def _makes(func: Any) -> bool:
    """True if the operator may return new tensors. Higher-order operators have no schema, and always may."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(result.alias_info is None for result in schema.returns)


def _is_tuning(frame: FrameType | None, namespace: dict[str, Any]) -> bool:
    """True if the stack shows that a kernel that the generated module launches is being tuned."""
    while frame is not None and frame.f_globals is not namespace:
        if frame.f_globals.get("__name__") == TUNING:
            return True
        frame = frame.f_back
    return False


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory in a tree of an operator's arguments or results."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.strided and tree.untyped_storage().nbytes() and not tree._is_zerotensor():
            yield tree
    elif isinstance(tree, (tuple, list)):
        for leaf in tree:
            yield from tensors(leaf)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))


def storages(tree: Any) -> dict[int, int]:
    """Return the sizes of the storages of the tensors in a tree, by address."""
    found = [tensor.untyped_storage() for tensor in tensors(tree)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


FULL = 256  # no library checks for more alignment
PLAIN = int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout
GROUP = 16  # operators, at least, whose memory is freed together: torch.cuda.memory_stats lists each pool for ever


class _Group:
    def __init__(self) -> None:
        self.pool: Any = None
        self.calls = 0
        self.addresses: list[int] = []


class Placing(AllocationObserver):
    """An observer of a capture, in whose `recording` it places allocations: outputs, which the plan names, in `placed`,
    and all others in `scratch`, addresses with their bytes. `with_uses`: note which memory matrix products read and
    write. A context manager: at its end, no pool of operators is selected."""

    def __init__(self, plan: AllocationPlan, recording: Any, with_uses: bool) -> None:
        super().__init__()
        self.plan, self.recording = plan, recording
        self.lives = Lives()
        self.placed: dict[int, int] = {}
        self.scratch: dict[int, int] = {}
        self.products: list[Product] | None = [] if with_uses else None
        self.results: list[tuple[int, int]] = []
        self.has_pools = bool(plan.watch or plan.operators or plan.detail)  # of operators
        self.asked = dict(plan.asked)
        self._before: dict[Any, tuple[int, int, list[int]]] = {}  # key -> allocations, bytes, those of the segments
        self.group = _Group()
        self.selected = contextlib.ExitStack()

    def __enter__(self) -> Placing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.selected.close()

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.products is None or not is_product(func):
            return func(*args, **kwargs)
        first = len(self.recording.nodes())
        result = func(*args, **kwargs)
        writes = storages(result)
        reads = {a: size for a, size in storages((args, kwargs)).items() if a not in writes}
        self.products.append(Product(first, len(self.recording.nodes()), tuple(reads.items()), tuple(writes.items())))
        return result

    def note_results(self, number: Numbered, made: Mapping[int, int]) -> None:
        super().note_results(number, made)
        self.results += made.items()

    def allocate(self, original: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        self.lives.tick()
        if len(args) != 3 or 0 in args[0]:
            return super().allocate(original, *args)
        view = TensorView(tuple(args[0]), tuple(args[1]), args[2])
        made = self.recording.place(view)
        address = made.data_ptr()
        if self.numbered(self.count) in self.plan.allocations:
            self.placed[address] = view.extent
            self.lives.note([address])
        else:
            self.scratch[address] = view.extent
            self.lives.begin(made)
        self.note(address)
        return made

    def run(self, number: Numbered | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. An operator of the plan allocates in a pool of its own. With `plan.detail`, so does every
        operator with a number: memory of a result lives as long as the result, other memory only as long as the
        operator runs."""
        if not self.has_pools:
            return self._call(func, args, kwargs)
        lives, planned = self.lives, number in self.plan.operators
        lives.tick()
        if number is None or not (planned or self.plan.detail):
            return (self._in_group if self.plan.detail else self._call)(func, args, kwargs)
        asked = self.plan.asked.get(number)
        key = _key(func, args, kwargs) if asked is None else None
        before = self._before.get(key) if key is not None else None
        call, known = functools.partial(self._call, func, args, kwargs), before[:2] if before is not None else asked
        result, segments, (count, requested) = self.recording.apart(call, known)
        sizes = sorted(segments.values())
        if before is not None and sizes != before[2]:
            count, requested = -1, sum(sizes)  # at most
        elif before is None and key is not None:
            self._before[key] = count, requested, sizes
        if segments:
            self.asked[number] = count, requested
        results = {t.untyped_storage().data_ptr(): t for t in tensors(result)}
        made = {a: results[a].untyped_storage().nbytes() for a in segments if a in results}
        temporary = aligned(requested - sum(made.values()))
        for address, size in segments.items():
            # If an address was used twice, the second allocation there may be the smaller one.
            least = made.get(address, temporary)
            bytes = min(size, least if count == len(segments) else max(least, temporary))
            (self.placed if planned and address in made else self.scratch)[address] = bytes
            if address in made:
                lives.begin(results[address])
            else:  # it was not returned
                lives.note([address])
                lives.end([address])
        return result

    def _in_group(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that returns nothing new, in a pool that it shares with others. They keep no memory: what
        they allocate, mostly workspaces of matrix products, counts as freed when the last one has run."""
        group, recording = self.group, self.recording
        if group.calls >= GROUP and group.addresses:
            self.end_group()
            group = self.group
        if group.pool is None:
            group.pool = recording.pool()
        if not group.calls or group.addresses:
            self.selected.enter_context(recording.within(group.pool))
        group.calls += 1
        before = recording.allocations_made()
        result = self._call(func, args, kwargs)
        if recording.allocations_made() != before:
            made = [address for address, _ in recording.allocations(before)]
            self.lives.note(made)
            group.addresses += made
        if group.addresses:  # nobody else may get memory that one of them has freed
            self.selected.close()
        return result

    def end_group(self) -> None:
        """Note that the memory of the group's operators is freed now."""
        self.selected.close()
        self.lives.end(self.group.addresses)
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
            parts.append(bit_key(value))
        else:
            return None
    return tuple(parts)
