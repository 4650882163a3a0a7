"""Define the operation for copies between device and host memory that don't block the host, and how Inductor writes it.

`destination.copy_(source, non_blocking=True)` between device and host is written as a call of `copy_`, into the memory
and from the memory that the user names (`copies_in_place` finds it): a copy on the stream where the user put it, as
eager does. Whether it returns early depends on the memory: with pinned memory it does, with pageable memory it doesn't,
and a copy that has to gather elements of the host or to scatter them there waits, in eager, too.

Inductor allocates pinned memory for what the graph computes on the host and uploads with `.to("cuda",
non_blocking=True)`, so that the upload doesn't block. If the caller gets that memory, too, it may write there while the
copy still reads: eager's memory is pageable, and has been read when the call returns. Such an upload blocks.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, lowerings
from torch._inductor.utils import get_free_symbols
from torch._inductor.virtualized import V
from torch._library.custom_ops import custom_op
from torch._prims_common import is_non_overlapping_and_dense_or_false

from torch_overlay._functorch.streams.fx import device_type, is_non_blocking, storage_node
from torch_overlay._functorch.streams.memory import results_made
from torch_overlay._inductor.user_lines import refuse_in_cpp


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

DESTINATION = "stream_copy_destination"  # in `meta`, of a copy: a fake tensor, the view of the memory that is written
RETURNED = "stream_copy_returned"  # in `meta`, of an upload that blocks because the caller gets what it reads


@custom_op("streams_memory::copy_async_", mutates_args=("memory",))
def copy_async_(memory: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between device and host, in the order of the current stream. Compiled code writes a range of `memory`."""
    memory.copy_(source, non_blocking=True)


@copy_async_.register_fake
def _(memory: torch.Tensor, source: torch.Tensor) -> None:
    return None


@custom_op("streams_memory::memory_like", mutates_args=())
def memory_like(value: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Allocate new memory for what a copy brings, in the layout of a value that isn't read."""
    return torch.empty_like(value, pin_memory=pinned)


@memory_like.register_fake
def _(value: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty_like(value)


COPY_ASYNC = torch.ops.streams_memory.copy_async_.default
MEMORY_LIKE = torch.ops.streams_memory.memory_like.default


class AsyncCopy(ir.ExternKernel):
    """A kernel that fills a range of a buffer from a value: on the other side (device or host), or for
    `copies_in_place.write_back_parts`.
    """

    def __init__(self, memory: ir.IRNode, part: ir.FixedLayout, source: ir.IRNode) -> None:
        inputs = self.unwrap_storage([self.realize_input(memory), self.realize_input(source)])
        sides = (memory.get_device(), source.get_device())
        device = next(d for d in sides if d is not None and d.type != "cpu")
        super().__init__(None, ir.NoneLayout(device=device), inputs, (), op_overload=COPY_ASYNC)
        self.part = part
        V.graph.mark_buffer_mutated(self.input_name(0))
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def destination(self) -> str:
        memory: Any = self.inputs[0]
        layout, whole = self.part, memory.get_layout()
        if (layout.size, layout.stride, layout.offset) == (whole.size, whole.stride, whole.offset):
            return memory.codegen_reference()
        if layout.dtype != whole.dtype:  # a real part of complex memory
            if V.graph.cpp_wrapper:
                refuse_in_cpp("a copy into a part of complex memory", self.origins)
            write: Any = V.graph.wrapper_code.codegen_python_shape_tuple
            size, stride = write(layout.size), write(layout.stride)
            numbers = f"torch.view_as_real({memory.codegen_reference()})"
            return f"reinterpret_tensor({numbers}, {size}, {stride}, {layout.offset})"
        return ir.ReinterpretView(data=memory, layout=layout).codegen_reference()

    def codegen(self, wrapper: Any) -> None:
        self.codegen_comment(wrapper)
        target, source = self.destination(), self.inputs[1].codegen_reference()  # type: ignore[union-attr]
        if V.graph.cpp_wrapper:
            wrapper.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_({target}, {source}, 1));")
        else:
            wrapper.writeline(f"{target}.copy_({source}, True)")

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        used = super().get_free_symbol_uses(unbacked_only)
        for expressions in (self.part.size, self.part.stride, (self.part.offset,)):
            used |= get_free_symbols(expressions, unbacked_only)
        return used

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        return True

    def get_mutation_names(self) -> Sequence[str]:
        return [self.input_name(0)]


def expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def _copy_async(memory: Any, source: Any) -> None:
    node: Any = V.graph.current_node
    whole, part = node.args[0].meta["val"], node.meta[DESTINATION]
    fix_layout(node.args[0], memory)
    if part.dtype != whole.dtype:
        whole = torch.view_as_real(whole)
    offset = expression(part.storage_offset()) - expression(whole.storage_offset())
    size, stride = ([*map(expression, numbers)] for numbers in (part.shape, part.stride()))
    AsyncCopy(memory, ir.FixedLayout(memory.get_device(), part.dtype, size, stride, offset), source)


def _memory_like(value: Any, pinned: bool) -> Any:
    made: Any = V.graph.current_node.meta["val"]
    size, stride = ([expression(n) for n in numbers] for numbers in (made.shape, made.stride()))
    return empty_strided(size, stride, dtype=made.dtype, device=made.device, pin_memory=pinned)


def fix_layout(node: Node, result: ir.TensorBox) -> None:
    """Give a result eager's layout from the start, so that what the caller gets of its memory, or what is put into it,
    is that memory and no copy.
    """
    result.realize()
    value = node.meta.get("val")
    is_open = isinstance(value, torch.Tensor) and isinstance(result.maybe_get_layout(), ir.FlexibleLayout)
    if is_open and is_non_overlapping_and_dense_or_false(value):
        ir.ExternKernel.require_exact_strides(result, value.stride())


lowerings[COPY_ASYNC] = _copy_async
lowerings[MEMORY_LIKE] = _memory_like


def upload_returned_memory_at_once(graph: Graph) -> None:
    """Make uploads of host memory that leaves the graph block, unless eager's memory is pinned as well."""
    returned = results_made(graph.output_node())
    for target in (torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default):
        for node in graph.find_nodes(op="call_function", target=target):
            source = storage_node(node.args[0])
            if source not in returned or source.op == "placeholder" or is_pinned(source):
                continue
            if device_type(source) == "cpu" and device_type(node) == "cuda":
                if is_non_blocking(node):
                    node.meta[RETURNED] = True
                if "non_blocking" in node.kwargs:
                    node.kwargs = {**node.kwargs, "non_blocking": False}
                node.args = (*node.args[:2], *(False for _ in node.args[2:]))


def is_pinned(node: Node) -> bool:
    """True if eager pins what the node makes: a download that doesn't block, or memory that was asked for as pinned."""
    if node.target is torch.ops.aten._pin_memory.default or node.kwargs.get("pin_memory"):
        return True
    is_copy = node.target is torch.ops.aten._to_copy.default and device_type(node.args[0]) == "cuda"
    return is_copy and is_non_blocking(node)
