"""Simulate a device, and estimate the time of each launch: Note [Times of a simulated run]."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from torch_overlay._functorch.device_peaks import bytes_per_us, flops_per_us
from torch_overlay._functorch.offload.device_rates import LINK, Rates
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.source_lines import is_generated, outward
from torch_overlay.analysis.race_check.trace import HOST
from torch_overlay.analysis.timelines.clock import Cost
from torch_overlay.analysis.timelines.model import FROM_HOST, KERNEL, ON_HOST, TO_HOST


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay.analysis.race_check.trace import Launch, View
    from torch_overlay.testing import Simulation

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


__all__ = ["TimedDevice"]
