"""Answer questions about nodes of FX graphs with streams: what a node is, and on which stream it is."""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING

import torch
import torch._dynamo.variables.streams  # has the operators of `torch.ops.streams`
from torch._functorch._aot_autograd.descriptors import AOTOutput, BackwardTokenAOTOutput, ForwardTokenAOTOutput
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay.orders import reached


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.fx import Graph, GraphModule, Node


BACKWARD = "stream_backward"  # in `meta`, not in `custom`: the node belongs to the backward
NAMESPACE = "streams"  # of the operators of stream programs

_aten = torch.ops.aten
_streams = torch.ops.streams
WAITS = (_streams.wait_event.default, _streams.wait_stream.default)
SYNCHRONIZE = (
    _streams.synchronize_event.default,
    _streams.synchronize_stream.default,
    _streams.synchronize_device.default,
)
DEALLOC = _streams.sync_dealloc.default
RECORD = _streams.record_event.default
RECORD_STREAM = _streams.record_stream.default
# Operator -> the method of its first argument that it stands for.
METHODS_OF_EVENTS = {"record_event": "record", "wait_event": "wait", "synchronize_event": "synchronize"}
METHODS_OF_STREAMS = {"wait_stream": "wait_stream", "synchronize_stream": "synchronize"}
_DEVICE_PUT = torch.ops.prims.device_put.default
COPIES = (_aten._to_copy.default, _DEVICE_PUT, _aten.copy.default, _aten.copy_.default)  # that may be between devices


def is_stream_operator(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverloadPacket):  # in Dynamo's graphs
        return target._qualified_op_name.partition("::")[0] == NAMESPACE
    return getattr(target, "namespace", "") == NAMESPACE


def is_stream_op(node: Node) -> bool:
    """True for an operation of the user's stream program, as opposed to one that computes."""
    return node.op == "call_function" and is_stream_operator(node.target)


def is_synchronization(node: Node) -> bool:
    """True if the host waits at the node for an event, a stream or a device."""
    return node.target in SYNCHRONIZE


def is_device_synchronization(node: Node) -> bool:
    return node.target is _streams.synchronize_device.default


def device_of(node: object) -> torch.device | None:
    """Return the device of a node's tensor, in Dynamo's graph or in AOTAutograd's; None for other values."""
    meta = node.meta if isinstance(node, torch.fx.Node) else {}
    value = meta.get("val", meta.get("example_value"))
    return value.device if isinstance(value, torch.Tensor) else None


def device_type(node: object) -> str:
    """Return the type of the device of a node's tensor; empty for other values."""
    device = device_of(node)
    return "" if device is None else device.type


def is_view(node: Node) -> bool:
    """True if the node names memory of its first argument. A conversion to the type that the argument already has
    counts too, if a copy from the host ends with it or a copy to the host begins with it. Any other conversion is a
    copy: `x.to(torch.float32, copy=True)`.
    """
    target = node.target
    if target is torch.ops.prims.convert_element_type.default:
        source: Any = node.args[0]
        made, given = node.meta.get("val"), source.meta.get("val") if isinstance(source, torch.fx.Node) else None
        if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor) or made.dtype != given.dtype:
            return False
        return source.target is _DEVICE_PUT or bool(node.users) and all(n.target is _DEVICE_PUT for n in node.users)
    return is_view_operator(target)


def is_view_operator(target: Any) -> bool:
    """True if the operator only names memory of its first argument."""
    return isinstance(target, torch._ops.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )


def is_view_by_call(node: Node) -> bool:
    """True if generated code calls the operator to make a view, which Inductor has no layout for."""
    value = node.meta.get("val")
    is_complex = isinstance(value, torch.Tensor) and value.is_complex() and is_view_operator(node.target)
    return is_complex or node.target in (torch.ops.aten.view_as_real.default, torch.ops.aten.view.dtype)


def base_of(node: Node) -> Node | None:
    """Return the value whose memory a node only names; None for a node that has memory of its own. A view with several
    outputs names its base's memory, and so does each output.
    """
    base = next(iter(node.args), None)
    if not isinstance(base, torch.fx.Node):
        return None
    return base if is_view(node) or (node.target is operator.getitem and is_view(base)) else None


def view_chain(node: Node) -> Iterator[Node]:
    """Yield a value and the values that it is a view of, down to the node that allocates the memory."""
    value: Node | None = node
    while value is not None:
        yield value
        value = base_of(value)


def storage_node(node: Node) -> Node:
    """Return the node whose memory a value names, below views of it."""
    *_, made = view_chain(node)
    return made


def names_of(value: Node) -> list[Node]:
    """Return a value and all views of it, each after its base."""
    names = [value]
    for name in names:
        names += [user for user in name.users if base_of(user) is name]
    return names


def users_of_memory(value: Node) -> list[Node]:
    """Return the operations that have a value, or a view of it, as an operand, and the views."""
    return [user for name in names_of(value) for user in name.users if user.op == "call_function"]


def readers_of(value: Node) -> list[Node]:
    """Return the operations that compute with a value, or with a view of it."""
    return [user for user in users_of_memory(value) if base_of(user) is None and not is_stream_op(user)]


def output_descriptions(output: Node) -> list[AOTOutput]:
    """Return upstream's descriptions of a graph's outputs, in the order of the outputs; none where there are none. The
    tokens of effects keep theirs when they are taken from the outputs.
    """
    found = list(output.meta.get("desc") or ())
    if len(found) == len(pytree.tree_leaves(output.args[0])):
        return found
    return [what for what in found if not isinstance(what, (BackwardTokenAOTOutput, ForwardTokenAOTOutput))]


def written_arguments(call: Any) -> dict[Any, Node]:
    """Return the values that an operator or a user's kernel updates in a functional graph, by the index of the new
    value among its results.
    """
    higher = torch.ops.higher_order
    if not isinstance(call, torch.fx.Node):
        return {}
    arguments: Any = call.kwargs
    found: dict[Any, Any] = {}
    if call.target is higher.triton_kernel_wrapper_functional:
        found = {name: arguments["kwargs"].get(name) for name in arguments["tensors_to_clone"]}
    elif call.target in (higher.auto_functionalized_v2, higher.auto_functionalized):
        (called,) = call.args[:1]
        schema = called._schema if isinstance(called, torch._ops.OpOverload) else None
        written = arguments.get("_all_bases", ())
        if call.target is higher.auto_functionalized:
            names = schema.arguments if schema is not None else ()
            written = [arguments.get(a.name) for a in names if a.alias_info is not None and a.alias_info.is_write]
        found = dict(enumerate(written, max(1, len(schema.returns) if schema is not None else 1)))
    return {index: value for index, value in found.items() if isinstance(value, torch.fx.Node)}


def updated_operands(node: Node) -> list[Node]:
    """Return the operands that an operation updates in place; all of them where its schema doesn't say."""
    schema = getattr(node.target, "_schema", None)
    if not isinstance(schema, torch._C.FunctionSchema):
        return node.all_input_nodes if isinstance(node.target, torch._ops.HigherOrderOperator) else []
    found: list[Node] = []
    for i, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [v for v in pytree.tree_leaves(value) if isinstance(v, torch.fx.Node)]
    return found


def constants(graph: Graph) -> set[Node]:
    """Return the operations computed from nothing and not at random: zeros, ones and operations on them alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if updates_operands(node.target):  # it writes to values that were made from nothing
            found.difference_update(map(storage_node, node.all_input_nodes))
        elif node.op == "call_function" and not is_random and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def updates_operands(target: Any) -> bool:
    is_kernel = target is torch.ops.higher_order.triton_kernel_wrapper_mutation
    return is_kernel or getattr(getattr(target, "_schema", None), "is_mutable", False)


def blocks_host(node: Node) -> bool:
    """True if the host returns from the launch only when the work is done: `.item()` of the device's memory, and
    copies between host and device that aren't marked `non_blocking`.
    """
    target, args = node.target, node.args
    if target is _aten._local_scalar_dense.default:
        return device_type(args[0]) != "cpu"
    if target not in COPIES:
        return False
    made, given = device_type(node), device_type(args[target in (_aten.copy.default, _aten.copy_.default)])
    return bool(made and given) and not is_non_blocking(node) and (made == "cpu") != (given == "cpu")


def is_non_blocking(copy: Node) -> bool:
    """True if the host need not wait for a copy, as far as the copy's arguments say."""
    return bool((*copy.args[2:3], copy.kwargs.get("non_blocking"))[0])


def is_asynchronous_copy(node: Node) -> bool:
    """True for a copy between host and device into memory that the user names, for which the host doesn't wait."""
    if node.target is not _aten.copy.default or len(node.args) < 3 or node.args[2] is not True:
        return False
    return {*map(device_type, node.args[:2])} - {""} == {"cpu", "cuda"}


def node_stream(node: Node) -> int:
    """Return the registry index of the stream that a node is placed on; 0 is the caller's stream."""
    return node.meta.get("custom", {}).get("stream") or CALLERS_STREAM


def has_streams(nodes: Iterable[Node], sign: Callable[[Node], bool] | None = is_stream_op) -> bool:
    """True if one of the nodes is on a side stream, or has another `sign` of streams, which depends on the graph:

    - Dynamo's graph, or one that is to be placed: an operation of the stream program. Those of profiler ranges don't
      count where streams decide whether ranges are wanted (`_dynamo.ranges`).
    - A placed graph: a fact that was noted of the node. Passes look for tokens (`fx_passes`), since a kernel on the
      caller's stream may be ordered with others; `facts.is_placed_program` looks for the graph's own fact.
    - None, where it matters only whether work is on another stream. Placement may leave records and synchronisations in
      a graph all of whose work is on the caller's stream.
    """
    return any(node_stream(node) or (sign is not None and sign(node)) for node in nodes)


def set_custom(node: Node, key: str, value: Any) -> None:
    """Set a key of the node's own copy of `custom`, which nodes may share; None, 0 and False remove it."""
    custom = dict(node.meta.get("custom", {}))
    if value:
        custom[key] = value
    else:
        custom.pop(key, None)
    if custom:
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)


def place_on(node: Node, stream: int) -> None:
    set_custom(node, "stream", stream)


_IN_PLACE = frozenset(
    (
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.setitem),
    )
)


def first_readers(nodes: Iterable[Node]) -> dict[Node, int]:
    """Map each input to the stream of the first operation that reads it. Autograd makes the node that accumulates the
    input's gradient for that operation. The graph may be Dynamo's or AOTAutograd's.
    """
    found: dict[Node, int] = {}
    for node in nodes:
        is_operation = node.op in ("call_function", "call_method") and not is_stream_op(node)
        if is_operation and node.target not in ("detach", _aten.detach.default):
            for value in node.all_input_nodes:
                if value.op == "placeholder":
                    found.setdefault(value, node_stream(node))
    return found


def updates_in_place(written: Any) -> bool:
    """True for a function, or a method's name, that updates its first argument in place as the user wrote it."""
    if isinstance(written, str):
        return written.endswith("_") and not written.endswith("__")
    name = getattr(written, "__name__", "")
    return written in _IN_PLACE or name.endswith("_") and not name.endswith("__")


def is_backward(node: Node) -> bool:
    """True for a node of a joint graph, once marked, or of a backward graph that autograd traced as backward."""
    return node.meta.get(BACKWARD) or node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def launches_kernels(gm: GraphModule) -> bool:
    """True if the graph launches kernels once unread nodes are dropped. Views and stream operations launch none."""
    kept = [n for n in gm.graph.nodes if n.op == "output" or (n.op == "call_function" and n.is_impure())]
    needed = reached(kept, lambda n: () if is_stream_op(n) else n.all_input_nodes)
    operations = (n for n in needed if n.op == "call_function" and not is_stream_op(n))
    return any(not is_view(n) and n.target is not operator.getitem for n in operations)
