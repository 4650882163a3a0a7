"""Notes the calls of library functions in a capture, and captures some of them again, alone.

    calls = LibraryCalls(recording, operators)
    with calls.noted(namespace):            # generated code calls them as attributes of the global `extern_kernels`
        region(inputs)
    again = capture_again(calls_of(calls.made, nodes), segments, other_recording)

A library chooses kernels by size, so most sizes launch a function that no proof has seen. To prove such a node, its
launch is needed at other addresses, and not that of the whole region. The tensors of a call are described by where they
lay, for to hold them would change what the capture sees of their lives.

Calls can be left out that are like an earlier one: all is equal that a library may choose a kernel by, which is sizes,
strides, types and alignments of tensors, and numbers. `repeated_calls` adds their nodes. They use again what memory the
earlier one had. So then calls have a pool of their own, or an operator's result might lie there by now.

Note [What a library keeps between calls]
A workspace is allocated by the first call that needs one, and used by later ones. So every call that allocated memory
is made again, before those that are wanted. Memory of the two captures corresponds if both allocated as much, in the
same calls and in the same order.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay._inductor.relaunch.capture.allocations import FULL
from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.memory.outputs import TensorView
from torch_overlay._inductor.relaunch.proof.nodes import Segment


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.allocations import Operators

LIBRARIES = "extern_kernels"
PLAIN = frozenset([int, float, bool, str, type(None)])
# Functions that are one operator, which launches all that they launch.
LEAVES = torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch._int_mm


class Differs(Exception):
    """The calls can't be made again as they were."""


@dataclass(slots=True)
class _CapturedTensor:
    """Where a tensor lay in the capture: its address, size, stride and type. `is_lazy`: its values are not those in its
    memory, but their conjugates or negatives."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: bool

    @property
    def view(self) -> TensorView:
        return TensorView(self.size, self.stride, self.dtype)

    @staticmethod
    def of(tensor: torch.Tensor) -> _CapturedTensor:
        is_lazy = tensor.is_conj() or tensor.is_neg()
        return _CapturedTensor(tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, is_lazy)


class Call(NamedTuple):
    """A call of a library: its arguments, with places for tensors, the nodes that it made, by their places in the order
    of the stream, and the memory that it allocated, (address, bytes). `returns`: it returns tensors of its own."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: range
    allocated: tuple[tuple[int, int], ...]
    returns: bool


class Repeat(NamedTuple):
    """A call that was left out. `like`: the number of the call that it repeats; `addresses`: of its tensors; `at`: how
    many nodes the graph had then; `time`: that of `allocations.Lives`."""

    like: int
    addresses: tuple[int, ...]
    at: int
    time: int


class Again(NamedTuple):
    """A capture of some of the calls."""

    recording: Any
    segments: list[Segment]


class LibraryCalls:
    """The calls of one capture, if they are `wanted`. `operators` runs calls of the `LEAVES`. With `leaves_out`, those
    that repeat an earlier call are not made."""

    def __init__(self, recording: Any, operators: Operators, wanted: bool = True, leaves_out: bool = False) -> None:
        self.recording, self.operators, self.wanted, self.leaves_out = recording, operators, wanted, leaves_out
        self.made: list[Call] = []
        self.repeats: list[Repeat] = []
        self._alike: dict[Any, int] = {}  # key -> number of the first such call
        self.thread = threading.get_ident()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return function(*args, **kwargs)
        recording = self.recording
        given, named = _exchanged(torch.Tensor, _CapturedTensor.of, args, kwargs)
        is_leaf = "out" in kwargs and any(function is leaf for leaf in LEAVES)
        if self.leaves_out and is_leaf and self._repeats(function, given, named):
            return kwargs["out"]
        nodes, allocations = recording.count(), recording.allocations_made()
        recording.clear_stack()  # so that the launchers find there what they find when the call is made alone
        call = functools.partial(function, *args, **kwargs)
        result = self.operators.run_leaf(call, apart=self.leaves_out) if is_leaf else call()
        made, allocated = range(nodes, recording.count()), tuple(recording.allocations(allocations))
        self.made.append(Call(function, given, named, made, allocated, returns="out" not in kwargs))
        return result

    def _repeats(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Note a call that is like an earlier one, or otherwise that later ones may be like it."""
        if (key := _key(function, args, kwargs)) is None:
            return False
        like = self._alike.setdefault(key, len(self.made))
        if like == len(self.made):
            return False
        time = self.operators.leave_out()
        addresses = tuple([place.address for place in places_of(args, kwargs)])
        self.repeats.append(Repeat(like, addresses, self.recording.count(), time))
        return True

    @contextlib.contextmanager
    def noted(self, namespace: dict[str, Any] | None) -> Iterator[None]:
        """Note the calls by the generated module with these globals."""
        if not self.wanted or namespace is None or LIBRARIES not in namespace:
            yield
            return
        original = namespace[LIBRARIES]
        namespace[LIBRARIES] = _Libraries(original, self)
        try:
            yield
        finally:
            namespace[LIBRARIES] = original


class _Libraries:
    """Stands for the global of generated code whose attributes are functions of libraries."""

    def __init__(self, original: Any, calls: LibraryCalls) -> None:
        self._original, self._calls = original, calls

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._calls.call, getattr(self._original, name))


def _exchanged(kind: type, by: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with others in place of those of a kind. Most are tensors and numbers, and a tree
    takes longer to walk than the call to make."""

    def one(value: Any) -> Any:
        if isinstance(value, kind):
            return by(value)
        return value if type(value) in PLAIN else pytree.tree_map_only(kind, by, value)

    return tuple([one(value) for value in args]), {name: one(value) for name, value in kwargs.items()}


def places_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_CapturedTensor]:
    """Return the places that stand for the tensors of a call."""
    return [value for value in (*args, *kwargs.values()) if type(value) is _CapturedTensor]


def _key(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key that calls have in common if they are alike; None if no other one can be like this one."""
    parts: list[Any] = [function, *kwargs]
    addresses: set[int] = set()
    for value in (*args, *kwargs.values()):
        if type(value) in PLAIN:
            parts.append(bit_key(value))
        elif type(value) is not _CapturedTensor or value.is_lazy or not value.address or value.address in addresses:
            return None
        else:
            addresses.add(value.address)
            parts.append((value.size, value.stride, value.dtype, value.address % FULL))
    return tuple(parts)


def calls_of(made: Sequence[Call], nodes: set[int]) -> list[Call]:
    """Return the calls that have to be made again to launch these nodes. Note [What a library keeps between calls].
    Raises Differs if other code launched one of the nodes."""
    wanted = [i for i, call in enumerate(made) if not nodes.isdisjoint(call.nodes)]
    if others := nodes.difference(*(made[i].nodes for i in wanted)):
        raise Differs(f"{len(others)} nodes are not launched by calls of a library")
    found = [call for i, call in enumerate(made[: wanted[-1] + 1]) if call.allocated or i in wanted]
    if any(call.returns for call in found):
        raise Differs("a library returns memory of its own")
    return found


def capture_again(calls: Sequence[Call], segments: Sequence[Segment], recording: Any) -> Again:
    """Make the calls in another recording, with memory at other addresses. `segments`: those of the capture that they
    are from; those of the result name the same regions. Raises Differs."""
    given = _OperandMemory(segments, recording)
    with recording:
        arguments = [_exchanged(_CapturedTensor, given.tensor, call.args, call.kwargs) for call in calls]
        with recording.capturing((), False):
            for call, (args, kwargs) in zip(calls, arguments):
                before = recording.allocations_made()
                recording.clear_stack()
                call.function(*args, **kwargs)
                given.note(call.allocated, recording.allocations(before))
    return Again(recording, given.segments)


class _OperandMemory:
    """The memory of calls that are made again, in segments like those of the capture."""

    def __init__(self, segments: Sequence[Segment], recording: Any) -> None:
        self.recording = recording
        self.known = sorted(segments, key=lambda segment: segment.address)
        self.starts = [segment.address for segment in self.known]
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.segments: list[Segment] = []

    def segment_of(self, address: int, size: int) -> Segment:
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0 or address + size > self.starts[at] + self.known[at].size:
            raise Differs("memory of a call is in no region")
        return self.known[at]

    def tensor(self, place: _CapturedTensor) -> torch.Tensor:
        if place.is_lazy:
            raise Differs("an argument is a conjugate or a negative")
        address, view = place.address, place.view
        segment = self.segment_of(address, view.extent)
        offset, odd = divmod(address - segment.address, view.dtype.itemsize)
        if odd:
            raise Differs("an argument lies between elements of its region")
        if segment.address not in self.storages:
            least = segment.address & -segment.address
            like = self.recording.place(TensorView((segment.size,), (1,), torch.uint8), min(least, FULL))
            self.storages[segment.address] = like.untyped_storage()
            self.segments.append(Segment(like.data_ptr(), segment.size, segment.region, segment.delta))
        made = torch.empty(0, dtype=view.dtype, device=self.recording.device)
        return made.set_(self.storages[segment.address], offset, view.size, view.stride)

    def note(self, allocated: Sequence[tuple[int, int]], again: Sequence[tuple[int, int]]) -> None:
        """Note that the memory that a call allocates `again` is that which it had allocated."""
        if [size for _, size in allocated] != [size for _, size in again]:
            raise Differs("a library allocates otherwise when it is called alone")
        for (first, _), (address, _) in zip(allocated, again):
            segment = self.segment_of(first, 0)
            self.segments.append(Segment(address, segment.size, segment.region, segment.delta))
