"""Rewrites an FX graph so that less of it touches host memory, which no CUDA graph may.

resident    an input in host memory that the graph only copies to the device, indexes with, or uses as a scalar, becomes
            an input on the device: Note [Resident inputs]
index       a tensor in host memory that indexes one on the device is copied to the device first, as eager does inside
            of the operator; Inductor then fuses the indexing, and moves constants when it compiles
round-trip  what goes to the host and comes back unchanged, but for its shape, stays on the device

What a program computes from a number in host memory for the device alone is computed there, in the joint graph: Note
[Numbers in host memory]. So the number is an input that is only copied.

Note [Resident inputs]
The compiled code takes the input on the device. `resident` keeps a copy there, and makes another one when a call passes
other bytes: values are compared, not addresses or version counters, for numpy writes to a tensor's memory without
either. Where the program copied the input, the graph clones the copy, so nothing that the program can hold, write to or
return shares memory with what is kept. Where the graph returns the input itself, or saves it for the backward, the
caller gets the tensor that it passed. What isn't rewritten: an input that is written to or donated (a backward's, whose
memory the code may use again), whose memory has gaps, that is larger than `LARGEST`, or that has a use of another kind;
and any graph with streams of the user's, in which a copy that blocks the host may order what other streams do.

Note [Numbers in host memory]
A float argument that changes is a tensor of one element in host memory for Inductor, and so is what `.item()` reads of
one in compiled code; operators on it convert its type, or compute a formula. The host would launch a kernel for them,
and copy the result. Inductor's own pass moves such operators to the device, too, but after the graph is partitioned:
what the backward reads of them is computed on the host. Operators move if all that they read is such a number or a
constant, and all that reads them moves, or is on the device and may read a number of the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import optimization_hint

from torch_overlay._functorch.streams.facts import placement
from torch_overlay._functorch.streams.ids import written_index
from torch_overlay._inductor.user_lines import source_line, trace_near
from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import GraphModule, Node

LARGEST = 1 << 20  # bytes of an input that is kept: they are compared at each call

aten, prims = torch.ops.aten, torch.ops.prims
INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default)
POSITIONS = (torch.int32, torch.int64)  # other types of indices are masks
COPIES = (aten.copy.default, prims.device_put.default)
# Operators that change the shape of a tensor, and not a value.
SHAPES = (
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
    *(aten.select.int, aten.slice.Tensor, aten.alias.default),
)


class Rewrite(NamedTuple):
    """What was rewritten, and where in the user's program."""

    kind: str
    line: str


class Resident(NamedTuple):
    """An input that is kept on a device: its position, the device as `ids.written_index` has it, and the outputs that
    are to be the caller's own tensor."""

    position: int
    device: int
    outputs: tuple[int, ...]


class Rewrites(NamedTuple):
    made: tuple[Rewrite, ...] = ()
    resident: tuple[Resident, ...] = ()

    def key(self) -> tuple[Any, ...]:
        """Return it for the keys of caches, without lines. A graph's text doesn't show that an input is to be copied to
        the device first."""
        return tuple([kind for kind, _ in self.made]), tuple(map(tuple, self.resident))


current = ThreadValue(Rewrites())  # of the graph that is being compiled


def rewrite(gm: GraphModule, example_inputs: Sequence[Any], donated: Sequence[int] = ()) -> tuple[Rewrites, list[Any]]:
    """Rewrite the graph in place. Return what was rewritten, and the example inputs of the new graph."""
    inputs = list(example_inputs)
    if not any(map(_is_on_host, gm.graph.nodes)) or placement(gm):
        return Rewrites(), inputs
    made = [*_copy_indices(gm), *_keep_round_trips(gm)]
    resident = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if position in donated or not isinstance(inputs[position], torch._subclasses.FakeTensor):
            continue
        if (device := _device_of_uses(node)) is not None:
            made.append(Rewrite("resident", _line(next(u for u in node.users if u.op != "output"))))
            resident.append(Resident(position, written_index(device.index), _move(gm, node, device)))
            inputs[position] = node.meta["val"]
    if made:
        gm.recompile()
    return Rewrites(tuple(made), tuple(resident)), inputs


def move_numbers(gm: GraphModule) -> None:
    """Compute on the device what only the device reads of numbers in host memory: Note [Numbers in host memory]."""
    graph = gm.graph
    found = [node for node in graph.nodes if _is_number(node)]
    if not found or placement(gm):
        return
    while len(moves := {node for node in found if _may_move(node, found)}) < len(found):
        found = [node for node in found if node in moves]
    devices = {_value(user).device for node in found for user in node.users if _reads_number(user, node)}
    computed = [node for node in found if node.op != "placeholder"]
    if not computed or len(devices) != 1:
        return
    (device,) = devices
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in found:
        if node.op != "placeholder":
            node.meta = _meta_on(node, device)
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(prims.device_put.default, (node, device))
        copy.meta = {"val": _on(_value(node), device), "stack_trace": trace_near(node)}
        for user in list(node.users):
            if user is not copy and user.op != "output" and user.target not in COPIES:
                user.replace_input_with(node, copy)
    gm.recompile()


def _is_number(node: Node) -> bool:
    """True if a node is an input of one element in host memory, or is computed there from such inputs."""
    value = _value(node)
    if not _is_on_host(node) or not isinstance(value, torch._subclasses.FakeTensor) or not _may_be_kept(value):
        return False
    if optimization_hint(value.numel(), fallback=0) != 1:
        return False
    is_computed = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in SHAPES
    return node.op == "placeholder" or (is_computed and bool(node.all_input_nodes))


def _may_move(node: Node, numbers: Sequence[Node]) -> bool:
    reads = node.all_input_nodes
    if reads and not (any(n in numbers for n in reads) and all(n in numbers or _is_constant(n) for n in reads)):
        return False
    stays = "output" if node.op == "placeholder" else None  # the caller gets the tensor that it passed
    return all(user in numbers or user.op == stays or _reads_number(user, node) for user in node.users)


def _is_constant(node: Node) -> bool:
    return node.target in (aten.full.default, aten.scalar_tensor.default) and not _value(node).dim()


def _reads_number(user: Node, node: Node) -> bool:
    """True if an operator on the device copies a tensor of the host, or reads it as it reads a number: a pointwise one
    does, where the tensor has no dimensions.
    """
    is_scalar = not _value(node).dim() and torch.Tag.pointwise in getattr(user.target, "tags", ())
    return _is_on_device(user) and (user.target in COPIES or is_scalar)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else None


def _is_on_host(node: Any) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _is_on_device(node: Any) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _line(node: Node) -> str:
    return source_line(trace_near(node))


def _on(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor like another one, on another device."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def _meta_on(node: Node, device: torch.device) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k != "tensor_meta"} | {"val": _on(_value(node), device)}


# ---- index


def _copy_indices(gm: GraphModule) -> Iterator[Rewrite]:
    for node in gm.graph.nodes:
        if node.target not in INDEXING or not _is_on_device(node.args[0]):
            continue
        indices = list(node.args[1])
        on_host = [i for i, index in enumerate(indices) if _is_on_host(index) and _value(index).dtype in POSITIONS]
        if not on_host:
            continue
        device = _value(node.args[0]).device
        with gm.graph.inserting_before(node):
            for i in on_host:
                copy = gm.graph.call_function(prims.device_put.default, (indices[i], device))
                copy.meta = {**node.meta, "val": _on(_value(indices[i]), device)}
                indices[i] = copy
        node.update_arg(1, indices)
        yield Rewrite("index", _line(node))


# ---- round-trip


def _keep_round_trips(gm: GraphModule) -> Iterator[Rewrite]:
    for node in gm.graph.nodes:
        if node.target is not prims.device_put.default or not _is_on_device(node) or not _is_on_host(node.args[0]):
            continue
        source, shapes = node.args[0], []
        while source.target in SHAPES:
            shapes.append(source)
            source = source.args[0]
        if source.target is not prims.device_put.default:
            continue
        origin = source.args[0]
        if not _is_on_device(origin) or _value(origin).device != _value(node).device:
            continue
        with gm.graph.inserting_before(node):
            stayed = origin
            for shape in reversed(shapes):
                moved = gm.graph.call_function(shape.target, (stayed, *shape.args[1:]), dict(shape.kwargs))
                moved.meta = {**shape.meta, "val": _on(_value(shape), _value(node).device)}
                stayed = moved
        _clone_instead(node, stayed)
        for dead in (*shapes, source):
            if not dead.users:
                gm.graph.erase_node(dead)
        yield Rewrite("round-trip", _line(node))


def _clone_instead(node: Node, source: Node) -> None:
    """Turn a copy to the device into a copy there."""
    node.target, node.args, node.kwargs = aten.clone.default, (source,), {}


# ---- resident


def _device_of_uses(node: Node) -> torch.device | None:
    """Return the device that an input is to be kept on; None if it is to stay on the host."""
    value = _value(node)
    if not _is_on_host(node) or not _may_be_kept(value):
        return None
    devices = set()
    for user in node.users:
        if user.op == "output":
            continue
        if not _reads_number(user, node):
            return None
        devices.add(_value(user).device)
    return devices.pop() if len(devices) == 1 else None


def _may_be_kept(value: torch.Tensor) -> bool:
    if value.layout != torch.strided or value.is_complex() or value.is_quantized:
        return False
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(value):
        return False
    return 0 < optimization_hint(value.numel(), fallback=LARGEST) * value.dtype.itemsize <= LARGEST


def _move(gm: GraphModule, node: Node, device: torch.device) -> tuple[int, ...]:
    """Put an input on the device. Return the outputs that were the input itself, and are None now."""
    node.meta = _meta_on(node, device)
    for user in list(node.users):
        if user.target is prims.device_put.default:
            _clone_instead(user, node)
    (output,) = gm.graph.find_nodes(op="output")
    (results,) = output.args
    same = tuple(i for i, result in enumerate(results) if result is node)
    output.args = (type(results)(None if i in same else result for i, result in enumerate(results)),)
    return same
