"""Generates wrapper code for copies of saved activations: direct calls of `offload.runtime`.

All of it is registered where Inductor looks for lowerings, and for the code of operators that have none (`register`).
So neither lowering nor code generation with streams knows these operators.

A load is a kernel that writes a buffer which the wrapper allocates, so its memory is planned like any other: allocated
from the caller's stream's memory, and freed to it. A store writes into the slab and reads a buffer in the layout that
the backward's load will give it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from torch_overlay._functorch.offload import ops


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode

RUNTIME = "from torch_overlay._functorch.offload.runtime import copy_in, copy_out, note_use, take_slab"


class LoadKernel(ir.ExternKernelOut):
    """A kernel that fills a tensor of the device from a slab."""

    def codegen(self, wrapper: Any) -> None:
        declare(wrapper)
        slab: Any = self.inputs[0]
        self.codegen_comment(wrapper)
        wrapper.writeline(f"copy_in({self.get_name()}, {slab.codegen_reference()}, {self.constant_args[0]})")


class StoreKernel(ir.ExternKernel):
    """A kernel that copies a tensor of the device into a slab."""

    def __init__(self, slab: ir.IRNode, source: ir.IRNode, offset: int) -> None:
        inputs = [self.realize_input(slab), self.realize_input(source)]
        layout = ir.NoneLayout(device=source.get_device())
        super().__init__(None, layout, self.unwrap_storage(inputs), (offset,), python_kernel_name="copy_out")
        V.graph.mark_buffer_mutated(self.input_name(0))
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def codegen(self, wrapper: Any) -> None:
        declare(wrapper)
        slab, source = (value.codegen_reference() for value in self.inputs)  # type: ignore[union-attr]
        self.codegen_comment(wrapper)
        wrapper.writeline(f"copy_out({slab}, {source}, {self.constant_args[0]})")

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        return True

    def get_mutation_names(self) -> Sequence[str]:
        return [self.input_name(0)]

    def get_unbacked_symbol_defs(self) -> Any:
        return type(super().get_unbacked_symbol_defs())()


def load(slab: Any, offset: int, size: Any, stride: Any, dtype: Any, device: Any) -> Any:
    layout = ir.FixedLayout(device=device, dtype=dtype, size=list(size), stride=list(stride))
    return ir.TensorBox.create(LoadKernel(layout, [slab], (offset,), python_kernel_name="copy_in"))


def store(slab: Any, source: Any, offset: int) -> None:
    node: Any = V.graph.current_node
    strides = node.args[1].meta["val"].stride()
    StoreKernel(slab, ir.ExternKernel.require_exact_strides(source, strides), offset)


def register() -> None:
    """Have Inductor lower and generate these operations. Called before a graph that has some is lowered."""
    lowerings[ops.LOAD] = load
    lowerings[ops.STORE] = store
    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{ops.SLAB}"] = CustomCodegen(python=take_slab)
    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{ops.IN_USE}"] = CustomCodegen(python=note_use)


def take_slab(node: Any, writeline: Callable[[str], None]) -> None:
    declare(V.graph.wrapper_code)
    writeline(f"{node.get_name()} = take_slab({', '.join(node.codegen_args())})")


def note_use(node: Any, writeline: Callable[[str], None]) -> None:
    declare(V.graph.wrapper_code)
    writeline(f"note_use({', '.join(node.codegen_args())})")


def declare(wrapper: Any) -> None:
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    if not wrapper.imports.contains(RUNTIME):
        wrapper.imports.writeline(RUNTIME)


# ---- queries of a schedule


def is_load(node: BaseSchedulerNode) -> bool:
    return isinstance(node.node, LoadKernel)


def is_store(node: BaseSchedulerNode) -> bool:
    return isinstance(node.node, StoreKernel)


def is_copy(node: BaseSchedulerNode) -> bool:
    return is_load(node) or is_store(node)
