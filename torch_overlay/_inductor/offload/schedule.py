"""Places the copies of saved activations on Inductor's final schedule.

After fusion and reordering it is known which buffers there are, and when. Here stores are moved after the operation
that makes their tensor, loads to where `offload.copy_placement` says, and operations get the stores that they wait
for (`Op.order_after`), so that the planner of streams can free memory after them. The slab is taken, and its use noted,
before everything else.
"""

from __future__ import annotations

import itertools
from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V

from torch_overlay._functorch.offload import log, ops
from torch_overlay._functorch.offload.copy_placement import (
    held_from,
    held_until,
    just_in_time,
    Load,
    MARGIN,
    place_loads,
    place_waits,
    Store,
)
from torch_overlay._functorch.offload.kernel_times import known_us
from torch_overlay._functorch.offload.ops import BUDGET, OWNER, VALUE
from torch_overlay._functorch.offload.reader import estimated_us, is_library_call
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.offload.codegen import is_copy, is_load, is_store
from torch_overlay._inductor.scheduler_nodes import device_us, user_stream


if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.offload.cost_model import Link
    from torch_overlay._functorch.offload.device_rates import Rates


def _is_first(node: BaseSchedulerNode) -> bool:
    return getattr(node.node, "op_overload", None) in (ops.SLAB, ops.IN_USE)


class Schedule:
    """A schedule: its steps without the copies, and the copies. `at_once`: a call of the code holds the memory of all
    its inputs and results until it has ended.
    """

    def __init__(self, scheduler: Scheduler, at_once: bool) -> None:
        self.scheduler = scheduler
        self.at_once = at_once
        nodes = scheduler.nodes
        self.first = [n for n in nodes if _is_first(n)]
        self.stores = [n for n in nodes if is_store(n)]
        self.loads = [n for n in nodes if is_load(n)]
        self.steps = [n for n in nodes if not (is_copy(n) or _is_first(n))]
        self.made: dict[str, int] = {}
        self.written: dict[str, int] = {}  # by name of a buffer, or of what an update in place makes of it
        self.last: dict[str, int] = {}
        self.first_read: dict[str, int] = {}
        for i, node in enumerate(self.steps):
            for output in node.get_outputs():
                self.written[output.get_name()] = i
                self.made.setdefault(self.real(output.get_name()), i)
                for name in output.get_aliases():
                    self.touch(self.real(name), i)
            for dependency in node.read_writes.reads:
                self.touch(self.real(dependency.name), i)
        for name in V.graph.get_output_names():
            self.last[self.real(name)] = len(self.steps)
        budgets = [
            origin.meta["custom"][BUDGET]
            for node in (*self.stores, *self.loads)
            for origin in node.node.get_origins()  # type: ignore[union-attr]
            if BUDGET in (origin.meta.get("custom") or {})
        ]
        self.placed: list[tuple[str, int, int]] = []
        self.budget: int = min(budgets, default=1 << 62)

    def real(self, name: str) -> str:
        return self.scheduler.mutation_real_name.get(name, name)

    def touch(self, name: str, step: int) -> None:
        self.first_read.setdefault(name, step)
        self.last[name] = max(self.last.get(name, step), step)

    def source(self, store: BaseSchedulerNode) -> str:
        """Return the name by which a store reads the buffer that it copies."""
        (name,) = {
            d.name
            for d in store.read_writes.reads
            if (device := _device(self.real(d.name))) is not None and device.type != "cpu"
        }
        return name

    def saved(self) -> list[tuple[int, int]]:
        """Return the bytes and the last reader of each tensor that the forward has saved on the device."""
        graph: Any = V.graph.module.graph  # type: ignore[union-attr]
        owners = {n.target: n.meta.get("custom", {}).get(OWNER) for n in graph.find_nodes(op="placeholder")}
        found: dict[Any, tuple[int, int]] = {}
        for name in V.graph.graph_inputs:
            if not name.startswith(("primals", "tangents")):
                owner = owners.get(name) or name
                size, last = found.get(owner, (0, 0))
                found[owner] = max(size, _bytes(name)), max(last, self.last.get(name, 0))
        return list(found.values())

    def live(self, away: set[str]) -> list[int]:
        """Return the bytes in memory at each step; the buffers in `away` are counted to the end."""
        changes = [0] * (len(self.steps) + 2)
        end = len(self.steps)
        for name, step in self.made.items():
            size = _bytes(name)
            if size:
                last = end if name in away else self.last.get(name, step)
                leaves = self.at_once and self.last.get(name) == end
                changes[(held_from(step, end) if V.graph.is_backward else 0) if leaves else step] += size
                changes[min(last, end) + 1] -= size
        for size, last in self.saved() if V.graph.is_backward else ():
            last = min(last, end)
            changes[0] += size
            changes[(held_until(last, end) if self.at_once else last) + 1] -= size
        for load in self.loads:
            name = _output(load)
            if name in self.first_read:
                changes[self.first_read[name]] += _bytes(name)
                changes[min(self.last[name], end) + 1] -= _bytes(name)
        found, now = [], 0
        for change in changes[:end]:
            now += change
            found.append(now)
        return found

    # -- the new order

    def place(self) -> tuple[list[BaseSchedulerNode], dict[BaseSchedulerNode, list[str]]]:
        """Return the nodes in their new order, and the stores that each node waits for."""
        before: list[list[BaseSchedulerNode]] = [[] for _ in range(len(self.steps) + 1)]
        order_after = self.place_stores(before)
        self.place_loads(before)
        order = list(self.first)
        for i, copies in enumerate(before):
            order += copies
            order += self.steps[i : i + 1]
        return order, order_after

    def place_stores(self, before: list[list[BaseSchedulerNode]]) -> dict[BaseSchedulerNode, list[str]]:
        read = [self.source(n) for n in self.stores]
        made = [self.written.get(name, -1) for name in read]
        sources = [self.real(name) for name in read]
        ends = self.copies_end(sources, made)
        stores = [
            Store(made[i], max(made[i], min(self.last.get(name, made[i]), len(self.steps) - 1)), _bytes(name), ends[i])
            for i, name in enumerate(sources)
        ]
        places = place_waits(self.live(set(sources)), stores, self.budget)
        order_after: dict[BaseSchedulerNode, list[str]] = {}
        for node, at, place in sorted(zip(self.stores, made, places), key=lambda item: item[1]):
            before[at + 1].append(node)
            while place < len(self.steps) and not self.launches(self.steps[place]):
                place += 1
            self.placed.append((_saved_name(node), at + 1, place))
            if place < len(self.steps):
                order_after.setdefault(self.steps[place], []).append(node.get_name())
        return order_after

    def launches(self, node: BaseSchedulerNode) -> bool:
        """True if the node is a kernel on the caller's stream, which can wait for a store."""
        device = node.get_device()
        is_kernel = device is not None and device.type != "cpu" and not isinstance(node, NopKernelSchedulerNode)
        return is_kernel and not isinstance(node.node, ir.MultiOutput) and not user_stream(self.scheduler, node)

    def times(self, device: Any) -> tuple[Link, list[float]]:
        """Return the rates of copies, and the times at which each step begins and the last one ends."""
        from torch_overlay._functorch.offload.device_rates import rates

        index = (device.index if device is not None else None) or 0
        known = rates(index)
        return known.link, list(itertools.accumulate((_step_us(n, known, index) for n in self.steps), initial=0.0))

    def copies_end(self, sources: list[str], made: list[int]) -> list[int]:
        """Return, for each store, a step by which its copy has ended, with a margin."""
        if not sources:
            return []
        link, starts = self.times(_device(sources[0]))
        ends = [len(self.steps)] * len(sources)
        done = 0.0
        for i in sorted(range(len(sources)), key=made.__getitem__):
            done = max(done, starts[made[i] + 1]) + MARGIN * (link.latency_us + _bytes(sources[i]) / link.out)
            ends[i] = next((k for k in range(made[i] + 1, len(self.steps)) if starts[k] >= done), len(self.steps))
        return ends

    def place_loads(self, before: list[list[BaseSchedulerNode]]) -> None:
        names = list(map(_output, self.loads))
        if not names:
            return
        loads = [Load(self.first_read.get(name, len(self.steps)), _bytes(name)) for name in names]
        link, starts = self.times(_device(names[0]))
        us = [link.latency_us + load.nbytes / link.back for load in loads]
        wanted = just_in_time(starts[:-1], [load.first for load in loads], us)
        live = self.live(set())
        # The memory in use without early loads may exceed the budget: loads within that peak cost nothing.
        places = place_loads(live, loads, max(self.budget, *live), wanted)
        for place, _, node in sorted(zip(places, (load.first for load in loads), self.loads), key=lambda t: t[:2]):
            before[place].append(node)
            self.placed.append((_saved_name(node), place, self.first_read.get(_output(node), len(self.steps))))


def _step_us(node: BaseSchedulerNode, known: Rates, device_index: int) -> float:
    """Return the device time of a step: as measured for the plan, or by the device's rates."""
    if isinstance(node.node, ir.MultiOutput):
        return 0.0
    origins = [o for o in node.node.get_origins() if is_library_call(o)] if node.is_extern() and node.node else []
    if len(origins) == 1:
        time = known_us(origins[0], device_index)
        return estimated_us(origins[0], known, device_index) if time is None else time
    return device_us(node) or 0.0


def _output(load: BaseSchedulerNode) -> str:
    return load.get_outputs()[0].get_name()


def _saved_name(copy: BaseSchedulerNode) -> str:
    """Return the name of the forward's node whose value is copied."""
    for origin in copy.node.get_origins():  # type: ignore[union-attr]
        if origin.target is ops.STORE:
            return origin.args[1].name
        if origin.target is ops.LOAD:
            return origin.meta["custom"][VALUE]
    return ""


def _device(name: str) -> Any:
    buffer: Any = V.graph.try_get_buffer(name)
    return buffer.get_device() if buffer is not None else None


def _bytes(name: str) -> int:
    """Return the bytes of device memory that the buffer owns."""
    buffer: Any = V.graph.try_get_buffer(name)
    device = buffer.get_device() if buffer is not None else None
    if device is None or device.type == "cpu":
        return 0
    layout = getattr(buffer, "layout", None)
    if layout is not None and not isinstance(layout, (ir.FixedLayout, ir.FlexibleLayout)):
        return 0
    if isinstance(layout, ir.NonOwningLayout) or not hasattr(buffer, "get_size"):
        return 0
    count = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(buffer), fallback=0)
    return count * buffer.get_dtype().itemsize


def slabs_of(scheduler: Any) -> set[str]:
    """Return the inputs of a backward that are slabs. They live until the region has been left, and its copies are
    joined."""
    return {d.name for n in scheduler.nodes if is_load(n) for d in n.read_writes.reads} & set(V.graph.graph_inputs)


def place_copies(scheduler: Any, at_once: bool) -> None:
    """Place the copies at the last moment at which the schedule may change."""
    if any(is_copy(n) for n in scheduler.nodes):
        schedule = Schedule(scheduler, at_once)
        scheduler.nodes, ScheduleNotes.of(scheduler).awaited_stores = schedule.place()
        log.publish(log.CopySchedule(V.graph.is_backward, len(schedule.steps), tuple(schedule.placed)))
        ScheduleNotes.of(scheduler).slabs = slabs_of(scheduler)
