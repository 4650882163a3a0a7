"""Simulate what autograd's engine does to streams in a backward; the engine does it in C++, out of Python's sight.

A node runs on the stream that was current when its forward ran. If a gradient comes from a node of another stream,
or from the caller, the engine makes the consumer's stream wait for the producer's stream, and records the consumer's
stream on the gradient. Gradients for one input are added up on the consumer's stream, in order of arrival. At the end,
the caller's current stream waits for the streams that wrote into leaves. Hooks on the nodes of the graph report the
same operations to the simulated device. (Compiled autograd traces such hooks; it has the engine run one node.)
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo.compiled_autograd

from torch_overlay.analysis.race_check.trace import ENGINE


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice


def nodes_of(tensors: Any) -> list[Any]:
    """Return the nodes of the autograd graph behind the tensors."""
    found: dict[Any, None] = {}
    todo = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += [n for n, _ in node.next_functions if n is not None]
    return list(found)


class _Hooks:
    def __init__(self, device: SimulatedDevice, caller: str) -> None:
        self.device, self.caller = device, caller
        self.produced: dict[Any, list[tuple[str, str]]] = {}  # node -> (stream, event) of each producer
        self.leaves: dict[str, str] = {}  # stream -> event after the last leaf
        self.handles: list[Any] = []

    def attach(self, node: Any) -> None:
        self.handles.append(node.register_prehook(lambda gradients: self.before(node, gradients)))
        self.handles.append(node.register_hook(lambda inputs, outputs: self.after(node, inputs)))

    def before(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        if self.device.is_listening():
            self.device.gradients = {}
            self.device.sweep()
            self.device.engine_takes(self.device.current(), self.produced.pop(node, ()), gradients)

    def after(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self.device.is_listening():
            return
        self.device.sweep()
        stream = self.device.current()
        event = self.device.record_new_event(stream, ENGINE)
        consumers = [(n, gradient) for (n, _), gradient in zip(node.next_functions, gradients) if n is not None]
        for consumer, gradient in consumers:
            produced = self.produced.setdefault(consumer, [])
            produced.append((stream, event))
            if gradient is not None and len(produced) > 1:
                self.device.gradients.setdefault(gradient.untyped_storage()._cdata, []).extend(produced)
        if not consumers:
            self.leaves[stream] = event

    def begin(self, tensors: Any) -> None:
        """Note the caller as the producer of the incoming gradients."""
        event = self.device.record_new_event(self.caller, ENGINE)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self.produced.setdefault(tensor.grad_fn, []).append((self.caller, event))

    def finish(self) -> None:
        self.device.engine_takes(self.caller, self.leaves.items())
        for handle in self.handles:
            handle.remove()


@contextlib.contextmanager
def engine(device: SimulatedDevice) -> Iterator[None]:
    original = torch.autograd._engine_run_backward

    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not device.is_listening():
            return original(tensors, *args, **kwargs)
        if device.before_backward is not None and not device.in_backward:
            device.before_backward()
        if torch._dynamo.compiled_autograd.compiled_autograd_enabled:
            return original(tensors, *args, **kwargs)
        device.sweep()
        device.ran_backward = True
        hooks = _Hooks(device, device.current())
        hooks.begin(tensors)
        for node in nodes_of(tensors):
            hooks.attach(node)
        device.in_backward += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            device.in_backward -= 1
            device.gradients = {}
            hooks.finish()

    with mock.patch.object(torch.autograd, "_engine_run_backward", run_backward):
        yield


__all__ = ["engine", "nodes_of"]
