"""Simulate the operators that the program calls: what they allocate, read and write, and if they block the host.

The tensors that an operator reads and writes follow from its schema.

Note [Autograd's engine on a simulated device]
A node of a backward runs on the stream that was current when its forward ran. If a gradient comes from a node of
another stream, or from the caller, the engine makes the consumer's stream wait for the producer's stream, and records
the consumer's stream on the gradient. Gradients for one input are added up on the consumer's stream, in order of
arrival. At the end, the caller's current stream waits for the streams that wrote into leaves. The engine does this in
C++, out of Python's sight, so hooks on the nodes of the graph report the same operations to the simulated device.
(Compiled autograd traces such hooks; it has the engine run one node.)
"""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo.compiled_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from torch_overlay.analysis.race_check.source_lines import assigned_name, site
from torch_overlay.analysis.race_check.trace import ENGINE, HOST, Synchronize, Wait


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice


class Operator:
    """The tensors that one call of an operator reads, writes and returns, from its schema."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.func = func
        self.reads: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []
        self.no_wait = False
        undeclared = _undeclared(func, args, kwargs)
        takes_layout = bool(_LAYOUT_ONLY.fullmatch(func._schema.name))
        aliases = False
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if argument.name == "non_blocking":
                self.no_wait = bool(value)
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
            written = argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
            aliases |= bool(tensors and argument.alias_info and not written)
            if written or not takes_layout:
                (self.writes if written else self.reads).extend(tensors)
            if written and not argument.is_out:  # updated in place
                self.reads.extend(tensors if not func._schema.name.endswith(_OVERWRITE) else ())
        # The schema of _unsafe_view doesn't declare a view. An operator that changes a tensor in place, but not the
        # data in its memory, declares a write. resize_ is no view: to enlarge memory is to copy it.
        names_memory = torch.Tag.inplace_view in func.tags and func._schema.name != "aten::resize_"
        self.is_view = (aliases and not self.writes) or names_memory or func is torch.ops.aten._unsafe_view.default
        known = {t.untyped_storage()._cdata for t in (*self.reads, *self.writes)}
        found = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.results = [t for t in found if t.untyped_storage()._cdata not in known]

    @property
    def changed(self) -> list[torch.Tensor]:
        return [*self.writes, *self.results]

    @property
    def touched(self) -> list[torch.Tensor]:
        return [*self.reads, *self.changed]

    def blocks_host(self, is_pinned: Callable[[torch.Tensor], bool]) -> bool:
        """True if the operator returns only when the device is done: by default, copies between host and device."""
        if not any(t.numel() for t in self.touched):
            return False  # nothing is copied: `torch.tensor([], device="cuda")`
        if to_host := [t for t in self.changed if not t.is_cuda]:
            made = self.func is aten._to_copy.default  # a new tensor: pinned if the copy doesn't block
            return not (self.no_wait and (made or all(map(is_pinned, to_host))))
        from_host = any(not t.is_cuda and t.dim() for t in self.reads)
        return self.func in _WAITING_COPIES and from_host and not self.no_wait


def _undeclared(func: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return the arguments that an operator writes although its schema doesn't declare it."""
    if func._schema.name not in ("aten::native_batch_norm", "aten::cudnn_batch_norm"):
        return ()
    names = [argument.name for argument in func._schema.arguments]
    training = {**dict(zip(names, args)), **kwargs}.get("training")
    return ("running_mean", "running_var") if training else ()


_LAYOUT_ONLY = re.compile(r"aten::(new_\w+|\w+_like)")  # these read only their argument's layout
_OVERWRITE = ("::copy_", "::_foreach_copy_", "::zero_", "::fill_")

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)
_WAITING_COPIES = (*_COPIES, aten._foreach_copy_.default)
_ALLOCATES = ("aten::empty", "aten::new_empty")


class SimulatedOperators:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.constants: dict[int, StorageWeakRef] = {}  # host memory that doesn't depend on the program's inputs

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        name = func._schema.name
        if func is aten.record_stream.default:
            return self.device.record_stream(*args)
        if name == "streams::synchronize_device":
            out = run()
            self.device.synchronize_device(int(args[0]) if args and isinstance(args[0], int) else 0)
            return out
        with self.device.pause():
            out = run()
        operator = Operator(func, args, kwargs, out)
        if func is aten.lift_fresh.default and not out.is_cuda:  # of `torch.tensor([...])`
            self.constants[out.untyped_storage()._cdata] = StorageWeakRef(out.untyped_storage())
        if operator.is_view:
            return out
        self.note_constants(func, operator)
        for tensor in operator.results:
            self.device.allocate(tensor, assigned_name() or f"result of {name.removeprefix('aten::')}")
        if name.startswith(_ALLOCATES) or func.namespace == "prim" or not operator.touched:
            return out
        self.work(func, operator)
        return out

    def work(self, func: Any, operator: Operator) -> None:
        name, reads, writes = str(func), operator.reads, operator.changed
        on_device = [t for t in operator.touched if t.is_cuda]
        if not on_device:
            self.device.launch(name, HOST, reads, writes)
            return
        stream = self.device.place(on_device[0])
        if func is aten._local_scalar_dense.default:
            self.device.launch(name, stream, reads, writes)
            self.device.trace.add(Synchronize(stream=stream, site=site()))
            return
        if func in _COPIES and len({self.device.place(t) for t in on_device}) > 1:
            self.peer_copy(name, reads, writes)
            return
        # Pinned memory is read by the device, on the stream, whether or not the host waits for that.
        for gradient in reads if self.device.gradients else ():
            self.device.engine_takes(stream, self.device.gradients.get(gradient.untyped_storage()._cdata, ()), reads)
        by_device = [t.is_cuda or self.device.mode.is_pinned(t) for t in reads]
        host_reads = [t for t, is_read_there in zip(reads, by_device) if not is_read_there]
        if host_reads:  # read before the operator returns
            self.device.launch(f"{name} (reads host memory)", HOST, host_reads, [])
        self.device.launch(name, stream, list(itertools.compress(reads, by_device)), writes)
        if operator.blocks_host(self.device.mode.is_pinned):
            of_constant = func in _COPIES and bool(host_reads) and all(map(self.is_constant, host_reads))
            wait = Synchronize(stream=stream, site=site(), of_constant=of_constant, implied=bool(operator.no_wait))
            self.device.trace.add(wait)

    def note_constants(self, func: Any, operator: Operator) -> None:
        """Note if the host memory that an operator writes is now a constant that a compiler knows, or no longer is."""
        known = torch.Tag.nondeterministic_seeded not in func.tags and all(map(self.is_constant, operator.reads))
        for storage in (t.untyped_storage() for t in operator.changed if not t.is_cuda):
            if known:
                self.constants[storage._cdata] = StorageWeakRef(storage)
            else:
                self.constants.pop(storage._cdata, None)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        known = self.constants.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def peer_copy(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Add a copy between devices: it runs on the source's stream, and PyTorch orders both streams around it."""
        source, target = self.device.place(reads[-1]), self.device.place(writes[0])

        def order(first: str, second: str) -> None:
            event = self.device.record_new_event(first, "a copy between devices")
            self.device.trace.add(Wait(event, second, "a copy between devices"))

        order(target, source)
        self.device.launch(name, source, reads, writes)
        order(source, target)


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


__all__ = ["SimulatedOperators", "engine", "nodes_of"]
