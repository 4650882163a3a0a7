"""Launches one captured region: all that a call needs is bound beforehand.

Note [A relaunch]
1. Everything that doesn't depend on the call is computed beforehand and bound into one C object (`native_call`), or
   into one closure where the launcher's nodes are patched in Python. A call only has to read the address of each input.
2. The C object compares each input's address with what the executable has. The closure compares the addresses of static
   inputs with their last ones by one call into torch, and patches them when they differ. A static input that keeps
   moving is no longer treated as static: the closure is made again.
3. Patching and launching are one step under a lock, for all threads share the executable. The driver orders the
   launches of one executable, and a patch affects only later launches. Where Python runs in that step, the garbage
   collector may run, too, and a finalizer may call compiled code. A thread that holds the lock of a launch doesn't wait
   for another one (`launching`): regions that are called in a launch run as compiled.
4. Outputs and scratch are allocated on the stream that the graph is launched on, the largest first. The scratch is
   freed right after the launch: the next user of the memory comes later on that stream.
5. The list of inputs is cleared after the launch, as compiled code clears it. A call that raises leaves it unchanged.
6. Saved outputs are views of one slab, or of a few chunks; each lives as long as one of its views.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from operator import and_
from typing import Any, TYPE_CHECKING

from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.launch import data_ptrs, native, native_call
from torch_overlay._inductor.relaunch.launch.native_call import Misaligned, raw
from torch_overlay._inductor.relaunch.memory.make_outputs import output_maker
from torch_overlay._inductor.relaunch.numbers.expressions import Unfit
from torch_overlay._inductor.relaunch.numbers.traced import Escaped
from torch_overlay._inductor.relaunch.numbers.words import values_of


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.memory.make_outputs import Outputs
    from torch_overlay._inductor.relaunch.memory.outputs import Layout, View
    from torch_overlay._inductor.relaunch.memory.sized import Sized
    from torch_overlay._inductor.relaunch.proof.nodes import Template

MOVES = 2  # an input that moved so often is not static
NOWHERE = 1  # the address of no tensor

live: weakref.WeakSet[Relaunch] = weakref.WeakSet()


class _Thread(threading.local):
    launching = False


_thread = _Thread()


def launching() -> bool:
    """True if this thread is in the middle of a launch: Note [A relaunch], 3."""
    return _thread.launching or native.launching()


class Relaunch:
    """A captured region that can be launched. `launch(inputs, originals)` is bound to the layout; `originals` are the
    caller's tensors where inputs are copies. `attempt(inputs)`, if there is one, returns None if the graph can't be
    launched.

    Neither function refers to its `Relaunch`, so that the executable is freed with the last reference to that.
    """

    launch: Callable[..., tuple[Any, ...]]
    attempt: Callable[[list[Any]], tuple[Any, ...] | None] | None = None

    def __init__(
        self,
        device: Any,
        layout: Layout,
        launcher: Any,
        static: Sequence[int],
        alignments: Sequence[int],
        sized: Sized | None = None,
    ) -> None:
        """`sized`: what a launch computes from the region's sizes; then only the C module can launch the graph, and
        `Escaped` is raised if it doesn't."""
        self.device, self.layout, self.launcher, self.alignments = device, layout, launcher, alignments
        self.sized = sized
        self.region = {position: region for region, position in enumerate(layout.inputs)}
        self.static = [k for k in static if k in self.region]
        self.addresses: list[int] = []  # of static inputs, by position
        self.moves: Counter[int] = Counter()
        self.lock = threading.Lock()
        self.counts = [0, 0]
        self.wrap: Callable[[Any], Any] = lambda function: function
        self.call = native_call.bind(self)
        if self.call is None and sized is not None:
            raise Escaped(frozenset(), "the graph is not launched by the C module")
        if self.call is None:
            self.bind()
        else:
            self.launch, self.attempt = self.call.launch, self.call.attempt
        live.add(self)

    @property
    def template(self) -> Template:
        return self.launcher.template

    def forget(self) -> None:
        """Drop what no launch needs."""
        self.launcher.forget()

    @property
    def totals(self) -> tuple[int, int]:
        """The number of launches, and of nodes patched."""
        if self.call is not None:
            return self.call.launches, self.call.patched
        return self.counts[0], self.counts[1]

    def bind(self) -> None:
        """Make the closure, with the inputs that still count as static. An earlier closure, which another thread may be
        about to call, finds that every static input has moved."""
        self.addresses[:] = [NOWHERE] * len(self.addresses)
        self.static = [k for k in self.static if self.moves[k] < MOVES]
        self.addresses = [NOWHERE] * (1 + max(self.static, default=-1))
        self.launch = self.wrap(self._bound())

    def show(self, wrap: Callable[[Any], Any]) -> None:
        """Have profilers show each launch: `wrap` puts what they show around a function."""
        self.wrap, self.launch = wrap, wrap(self.launch)
        self.attempt = wrap(self.attempt) if self.attempt is not None else None

    def note_moves(self, static: Sequence[int], addresses: list[int], now: Sequence[int]) -> None:
        if addresses is not self.addresses:  # called by an earlier closure
            self.addresses[:] = [NOWHERE] * len(self.addresses)
            return
        for k, address in zip(static, now):
            self.moves[k] += addresses[k] not in (address, NOWHERE)
            addresses[k] = address
        if any(self.moves[k] >= MOVES for k in static):
            self.bind()

    def _bound(self) -> Callable[..., tuple[Any, ...]]:
        layout, totals, lock, empty = self.layout, self.counts, self.lock, self.device.empty
        patch, replay = self.launcher.patch, self.launcher.replay
        static, addresses = self.static, self.addresses
        moving = [k for k in layout.inputs if k not in static]
        same, addresses_of = data_ptrs.same, data_ptrs.addresses
        masks = tuple(self.alignments[k] - 1 for k in moving)
        numbers, write = self.template.numbers, getattr(self.launcher, "write", None)
        own, order = len(layout.own), layout.order
        arguments = [*map(self.allocation, layout.own), raw(layout.saved_size), raw(layout.scratch_size)]
        allocations = [(k, arguments[k]) for k in order]
        regions = [self.region[k] for k in moving] + [len(layout.inputs) + k for k in order]
        all_regions = regions + [self.region[k] for k in static]
        static_masks = tuple(self.alignments[k] - 1 for k in static)
        me, finish, thread = weakref.ref(self), self.outputs(), _thread

        def patch_all(inputs: Sequence[Any], bases: list[Any]) -> int:
            """Patch all regions, since a static input has moved."""
            now = addresses_of(inputs, static)
            if any(map(and_, now, static_masks)):
                raise Misaligned
            before, addresses[:] = list(addresses), [NOWHERE] * len(addresses)  # as long as it isn't known
            count = patch([*bases, *now], all_regions)
            addresses[:] = before
            if (relaunch := me()) is not None:
                relaunch.note_moves(static, addresses, now)
            return count

        def launch(inputs: list[Any], originals: Sequence[Any] | None = None) -> tuple[Any, ...]:
            given = addresses_of(inputs, moving)
            if any(map(and_, given, masks)):
                raise Misaligned
            try:
                values = values_of(numbers, inputs, layout.computed)
            except Unfit as error:
                raise Misaligned from error
            made = {k: empty(*size_stride_dtype) for k, size_stride_dtype in allocations}
            bases = [*given, *made.values()]
            with lock:
                thread.launching = True
                try:
                    if not static or same(inputs, addresses, static):
                        totals[1] += patch(bases, regions)
                    else:
                        totals[1] += patch_all(inputs, bases)
                    if write is not None:
                        write(values)
                    replay()
                finally:
                    thread.launching = False
                totals[0] += 1
            result = finish(originals or inputs, [made[k] for k in range(own)], made.get(own))
            counters["torch_overlay"]["cudagraph_relaunches"] += 1
            inputs.clear()
            return result

        return launch

    # -- outputs

    def primary(self, storage: int) -> View | None:
        return self.layout.primary(storage)

    def allocation(self, storage: int) -> tuple[Any, ...]:
        return self.layout.allocation(storage)

    def outputs(self) -> Outputs:
        return output_maker(self.layout, self.device.empty)
