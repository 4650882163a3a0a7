"""Compute when each operation of a trace would run, in one pass with a clock for each stream and one for the host.

A stream runs its launches in order. A record notes the time of its stream, a wait advances its stream to the time of
the record, a synchronisation advances the host. Copies between host and device run one after the other in each
direction, whatever their streams, since they share the link.

Memory is counted in device time: it counts as allocated when its first kernel starts, and as freed when its own stream
has reached the point at which the host freed it, and every kernel that used it has ended.

`TimedDevice` is the simulated device that estimates the time of each launch: Note [Times of a simulated run].
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass, field, replace
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from torch_overlay._functorch.device_peaks import bytes_per_us, flops_per_us
from torch_overlay._functorch.offload.device_rates import LINK, Rates
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.source_lines import is_generated, outward
from torch_overlay.analysis.race_check.trace import Alloc, Free, HOST, Launch, Record, Synchronize, Wait
from torch_overlay.analysis.timelines.lines import own_line, readable
from torch_overlay.analysis.timelines.model import (
    Arrow,
    COPIES,
    FROM_HOST,
    KERNEL,
    Lane,
    lane_name,
    ON_HOST,
    Slice,
    TO_HOST,
    WAIT,
    with_hidden,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch_overlay.analysis.race_check.trace import Memory, Operation, View
    from torch_overlay.testing import Simulation


@dataclass(frozen=True)
class Cost:
    """The duration of a launch, in microseconds, the kind of its slice, and the bytes it moves."""

    us: float
    kind: str = KERNEL
    nbytes: int = 0


@dataclass
class _Stream:
    free: float = 0.0
    last: int | None = None  # its last slice, by index
    pending: list[tuple[str, _Moment]] = field(default_factory=list)  # events that its next slice waits for


@dataclass(frozen=True)
class _Moment:
    stream: str
    at: float
    source: int | None


class _SimulatedClock:
    def __init__(self, costs: Mapping[int, Cost], saved: Mapping[int, tuple[str, str]]) -> None:
        self.costs, self.saved = costs, saved
        self.host = 0.0
        self.streams: dict[str, _Stream] = {}
        self.links: dict[str, float] = {}  # direction -> time at which the link is free
        self.events: dict[str, _Moment] = {}
        self.slices: list[tuple[str, Slice]] = []
        self.arrows: list[tuple[str, _Moment, str, float, int | None]] = []
        self.used: dict[Memory, list[float]] = {}  # -> [start of the first use, end of the last one]
        self.fresh: set[Memory] = set()
        self.changes: list[tuple[float, int]] = []

    def stream(self, name: str) -> _Stream:
        return self.streams.setdefault(name, _Stream())

    def launch(self, index: int, launch: Launch) -> None:
        cost = self.costs.get(index, Cost(0.0, ON_HOST if launch.stream == HOST else KERNEL))
        stream = self.stream(launch.stream)
        start = max(self.host, stream.free, self.links.get(cost.kind, 0.0) if cost.kind in COPIES else 0.0)
        end = start + cost.us
        number = len(self.slices)
        what, line = self.saved.get(index, ("", own_line(launch.line)))
        name = readable(launch.name) if cost.kind not in COPIES else f"{cost.kind} {what}".strip()
        self.slices.append((launch.stream, Slice(0, start, cost.us, name, line, cost.kind, launch.name, cost.nbytes)))
        for event, moment in stream.pending:
            self.arrows.append((event, moment, launch.stream, start, number))
        stream.pending, stream.free, stream.last = [], end, number
        if cost.kind in COPIES:
            self.links[cost.kind] = end
        if launch.stream == HOST:
            self.host = end
        for access in launch.accesses:
            memory = access.view.memory
            if memory.stream != HOST:
                span = self.used.setdefault(memory, [start, end])
                span[1] = max(span[1], end)

    def record(self, event: str, name: str) -> None:
        stream = self.stream(name)
        self.events[event] = _Moment(name, max(stream.free, self.host), stream.last)

    def wait(self, event: str, name: str) -> None:
        moment = self.events.get(event)
        if moment is None or moment.stream == name:
            return
        stream = self.stream(name)
        stream.free = max(stream.free, moment.at)
        stream.pending = [(e, m) for e, m in stream.pending if m.stream != moment.stream] + [(event, moment)]

    def synchronize(self, operation: Synchronize) -> None:
        if operation.event is not None:
            moment = self.events.get(operation.event)
            ready, on = (0.0, "") if moment is None else (moment.at, operation.event)
        else:
            names = (operation.stream,) if operation.stream is not None else operation.streams or tuple(self.streams)
            ready = max((self.streams[n].free for n in names if n in self.streams), default=0.0)
            on = names[0] if len(names) == 1 else "the device"
        if ready > self.host:
            self.slices.append((HOST, Slice(0, self.host, ready - self.host, f"waits for {on}", kind=WAIT)))
            self.stream(HOST).free = self.host = ready

    def free(self, memory: Memory) -> None:
        if memory in self.fresh and memory in self.used:
            start, end = self.used.pop(memory)
            self.fresh.discard(memory)
            self.changes += [(start, memory.size), (max(end, self.stream(memory.stream).free), -memory.size)]

    def finish(self) -> None:
        for memory in self.fresh & self.used.keys():
            self.changes.append((self.used[memory][0], memory.size))
        for name, stream in self.streams.items():
            for event, moment in stream.pending:
                self.arrows.append((event, moment, name, stream.free, None))


def schedule(
    operations: Iterable[Operation],
    costs: Mapping[int, Cost],
    *,
    title: str,
    devices: Mapping[str, int] | None = None,
    saved: Mapping[int, tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the fields of the `Timeline` of a trace. `costs` maps the index of a launch to its cost, `devices` a
    stream to its device, and `saved` the index of a copy of a saved activation to the activation's name and line.
    """
    clock = _SimulatedClock(costs, saved or {})
    for index, operation in enumerate(operations):
        match operation:
            case Launch():
                clock.launch(index, operation)
            case Record():
                clock.record(operation.event, operation.stream)
            case Wait():
                clock.wait(operation.event, operation.stream)
            case Synchronize():
                clock.synchronize(operation)
            case Alloc() if operation.memory.stream != HOST:
                clock.fresh.add(operation.memory)
            case Free():
                clock.free(operation.memory)
    clock.finish()
    names = list(dict.fromkeys((*(name for name, _ in clock.slices), *(m.stream for _, m, *_ in clock.arrows))))
    titles = {n: lane_name(n, [s for lane, s in clock.slices if lane == n]) for n in names}
    # Order: default streams, other streams in order of use, streams of copies, the host.
    names.sort(key=lambda n: (n == HOST, titles[n] != n, not n.startswith("default stream")))
    lanes = [Lane(titles[n], -1 if n == HOST else (devices or {}).get(n, 0)) for n in names]
    number = {name: index for index, name in enumerate(names)}
    slices = [replace(s, lane=number[name]) for name, s in clock.slices]
    arrows = [
        Arrow(event, number[m.stream], m.at, number[lane], at, m.source, target)
        for event, m, lane, at, target in clock.arrows
        if lane in number
    ]
    return {
        "title": title,
        "lanes": tuple(lanes),
        "slices": tuple(with_hidden(lanes, slices)),
        "arrows": tuple(arrows),
        "memory": running_sum(clock.changes),
    }


def running_sum(changes: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return (time, bytes from then on). At equal times, frees count before allocations."""
    found: dict[float, int] = {}
    total = 0
    for at, change in sorted(changes):
        total += change
        found[at] = total
    return tuple(found.items())


LEAST_US = 2.0  # time of a kernel that does nothing
HOST_BYTES_PER_US = 1e4  # speed of the host's own computations


class TimedDevice(SimulatedDevice):
    """A simulated device that keeps the cost of each launch in `costs`, by its index in `trace`."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.costs: dict[int, Cost] = {}
        # Bytes and operations of each generated kernel, by the text of its module and its name.
        self.counted: dict[str, dict[str, tuple[int, int, int]]] = {}
        self.rates = Rates(LINK, 0.8 * bytes_per_us(0), 0.5 * flops_per_us(0, 2), False)
        self._call: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> TimedDevice:
        super().__enter__()
        self._stack.enter_context(self._counting())
        return self

    def begin(self) -> None:
        super().begin()
        self.costs = {}

    def dispatch(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        if not self.is_listening():
            return run()
        before, self._call = self._call, (func, args, kwargs)
        try:
            return super().dispatch(func, args, kwargs, run)
        finally:
            self._call = before

    def launch(
        self,
        name: str,
        stream: str,
        reads: Sequence[torch.Tensor | View],
        writes: Sequence[torch.Tensor | View],
        line: str | None = None,
    ) -> None:
        super().launch(name, stream, reads, writes, line)
        index = len(self.trace.operations) - 1
        launch: Any = self.trace.operations[index]
        if launch.stream == HOST:
            moved = sum(traffic(access.view) for access in launch.accesses)
            self.costs[index] = Cost(moved / HOST_BYTES_PER_US, ON_HOST, moved)
        elif (kind := _direction(launch, self._call)) is not None:
            nbytes = sum(traffic(a.view) for a in launch.accesses if a.writes)
            rate = self.rates.link.out if kind == TO_HOST else self.rates.link.back
            self.costs[index] = Cost(self.rates.link.latency_us + nbytes / rate, kind, nbytes)
        else:
            self.costs[index] = self._kernel(launch, [t for t in (*reads, *writes) if isinstance(t, torch.Tensor)])

    def _kernel(self, launch: Launch, tensors: Sequence[torch.Tensor]) -> Cost:
        nbytes = sum(traffic(a.view) * (a.reads + a.writes) for a in launch.accesses)
        item = min((t.element_size() for t in tensors if t.is_floating_point()), default=4)
        flops = 0
        if self._call is not None:
            flops = operations(*self._call)
        elif (known := self._counted(launch.name)) is not None:
            nbytes, flops, item = known
        time = max(nbytes / self.rates.bytes, flops / self.rates.flops_of(0, item), LEAST_US)
        return Cost(time, KERNEL, nbytes)

    # ---- what Inductor counts

    def _counted(self, kernel: str) -> tuple[int, int, int] | None:
        """Return bytes, operations and element size of the generated kernel that is being launched, if known."""
        generated = next(filter(is_generated, outward(sys._getframe())), None)
        return generated and self.counted.get(generated.f_globals["_module"].original, {}).get(kernel)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Note the scheduler's counts for each kernel that is generated inside the context."""
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        codegen, generate = GraphLowering.codegen, PythonWrapperCodegen.generate_kernel_call
        open_modules: list[dict[str, tuple[int, int, int]]] = []

        def keep_module(graph: Any) -> Any:
            open_modules.append({})
            try:
                result = codegen(graph)
                self.counted[getattr(result[0], "value", str(result[0]))] = open_modules[-1]
                return result
            finally:
                open_modules.pop()

        def keep_kernel(wrapper: Any, kernel_name: str, *args: Any, **kwargs: Any) -> Any:
            node = getattr(getattr(V.graph, "scheduler", None), "current_node", None)
            if open_modules and node is not None and kernel_name not in open_modules[-1]:
                with contextlib.suppress(Exception):  # unknown size: the launch counts by its arguments
                    open_modules[-1][kernel_name] = _scheduled(node)
            return generate(wrapper, kernel_name, *args, **kwargs)

        with (
            mock.patch.object(GraphLowering, "codegen", keep_module),
            mock.patch.object(PythonWrapperCodegen, "generate_kernel_call", keep_kernel),
        ):
            yield


def _scheduled(node: Any) -> tuple[int, int, int]:
    """Return bytes, operations and element size of a node of the scheduler."""
    from torch_overlay._inductor.scheduler_nodes import element_size, flops_of

    flops = flops_of(node) if node.is_template() else 0
    return int(node.get_read_write_buffers_sizes()), int(flops or 0), element_size(node)


def traffic(view: View) -> int:
    """Return the bytes that a view covers; expanded dimensions count once."""
    if view.span is None:
        return view.memory.size
    return view.span.item * math.prod(n for n, stride in zip(view.span.sizes, view.span.strides) if stride)


def operations(func: Any, args: Any, kwargs: Any) -> int:
    """Return the floating-point operations of an operator, by PyTorch's formulas; 0 if it has no formula."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    result = kwargs.get("out")
    try:
        return int(formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=result))
    except Exception:  # the formula takes other arguments: memory traffic alone gives the time
        return 0


def _direction(launch: Launch, call: tuple[Any, Any, Any] | None) -> str | None:
    """Return the kind of a copy between host and device. The host reads pageable memory in a launch of its own."""
    if "copy" not in launch.name:
        return None
    if any(a.writes and a.view.memory.stream == HOST for a in launch.accesses):
        return TO_HOST
    if any(a.view.memory.stream == HOST for a in launch.accesses):
        return FROM_HOST
    given = pytree.tree_leaves((call[1], call[2])) if call is not None else ()
    is_source = [not t.is_cuda and t.dim() > 0 for t in given if isinstance(t, torch.Tensor)]
    return FROM_HOST if any(is_source) else None


__all__ = ["Cost", "running_sum", "schedule", "TimedDevice"]
