"""Decides which conditions of a program (`torch.cond`) are chosen by the device, inside of a CUDA graph, and writes the
generated code of those: Note [Branches in a graph] of `graph.conditional_nodes`. All others are split off.
"""

from __future__ import annotations

import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from torch_overlay import config
from torch_overlay._inductor.relaunch import attention_seeds, split_off
from torch_overlay._inductor.relaunch.attention_seeds import PROBABILITY
from torch_overlay._inductor.relaunch.capture.allocations import OURS
from torch_overlay._inductor.streams.planned_region import needs_plan


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule, Node

SWITCH = "Switch ops"  # upstream's reason to cut
RUNTIME = "from torch_overlay._inductor.relaunch.capture.branches import choose"
ARE_INSIDE: bool = True  # False splits all conditions off, for comparisons
DEVICES = ("cuda",)
SYMBOLIC = torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool
DEPTH = 2  # of conditions in branches
FLEX = ("flex_attention", "flex_attention_backward")
LAUNCHING = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional", *FLEX)  # higher-order operators
CONSTANTS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)

_known: weakref.WeakKeyDictionary[Node, str | None] = weakref.WeakKeyDictionary()  # condition -> why it can't be inside


def is_chosen_by_device(node: Node) -> bool:
    """True if a node of an FX graph is a condition that can be in a CUDA graph."""
    return node.target is torch.ops.higher_order.cond and why_not(node) is None


def why_not(node: Node) -> str | None:
    """Return why a `torch.cond` can't be in a CUDA graph; None if it can."""
    if node not in _known:
        _known[node] = _why_not(node, 1)
    return _known[node]


def _why_not(node: Node, depth: int) -> str | None:
    import torch._inductor.config as inductor_config

    predicate = getattr(node.args[0], "meta", {}).get("val")
    is_tensor = isinstance(predicate, torch.Tensor)
    if not is_tensor or predicate.dtype != torch.bool or predicate.device.type not in DEVICES:
        return "its predicate is no boolean on the device"
    if (failed := split_off.failed().get("cond")) is not None:
        return f"it {failed}"
    if depth > DEPTH:
        return f"conditions are more than {DEPTH} deep"
    if inductor_config.triton.cudagraph_skip_dynamic_graphs or config.cudagraphs != "relaunch" or not ARE_INSIDE:
        return "the options exclude it"
    for value in tree_leaves(node.meta.get("val")):
        if not isinstance(value, torch.Tensor) or value.device != predicate.device:
            return "it returns something else than tensors on the device"
        if free_unbacked_symbols(value):
            return "the results of its branches differ in size"
    branches: list[Any] = [getattr(node.graph.owning_module, branch.target) for branch in node.args[1:3]]  # type: ignore[union-attr, arg-type]
    return next(filter(None, (_why_not_branch(each, predicate.device, depth) for each in branches)), None)


def _may_draw(node: Node) -> bool:
    """True if an operator may draw random numbers: attention does only with a dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args)) | node.kwargs
    return PROBABILITY not in names or bool(given.get(PROBABILITY))


def _why_not_branch(module: GraphModule, device: torch.device, depth: int) -> str | None:
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    returned = module.graph.output_node().all_input_nodes
    for node in module.graph.nodes:
        values = tree_leaves(node.meta.get("val"))
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        if any(v.device != device and not (node.target in CONSTANTS and not v.dim()) for v in tensors):
            return f"a branch has a tensor on the host ({node})"
        if any(isinstance(v, SYMBOLIC) and free_unbacked_symbols(v) for v in values):
            return f"a branch has a number, or a size, that depends on data ({node})"
        if node.op != "call_function":
            continue
        operator = node.target
        if operator is torch.ops.higher_order.cond:
            if (why := _why_not(node, depth + 1)) is not None:
                return f"a condition in a branch: {why}"
        elif isinstance(operator, torch._ops.HigherOrderOperator) and operator.name() not in LAUNCHING:
            return f"a branch calls {operator.name()}"
        elif _may_draw(node) or attention_seeds.are_returned(node, returned):
            return f"a branch draws random numbers ({operator})"
        elif isinstance(operator, torch._ops.OpOverload) and operator.namespace not in OURS:
            return f"a branch calls a custom operator ({operator})"
        elif is_cudagraph_unsafe_fx_node(node):
            return f"a branch calls {operator}"
    return None


def _is_inside(scheduler: Any, switch: Any) -> bool:
    """True if a node of Inductor's is a condition inside of a graph. Streams of the program's own are planned around
    it, not in it."""
    return not needs_plan(scheduler) and is_chosen_by_device(switch.fx_node)


def reason_to_cut(scheduler: Any, node: Any, reason: str | None) -> str | None:
    """Return why the graph is partitioned at a node, or None. `reason`: what it would be without conditions inside."""
    from torch._inductor.ir import MultiOutput, Switch

    switch = node.node.inputs[0] if isinstance(node.node, MultiOutput) else node.node
    if not isinstance(switch, Switch):
        return reason
    return None if reason in (None, SWITCH) and _is_inside(scheduler, switch) else reason or SWITCH


def codegen_switch(original: Callable[..., None], wrapper: Any, switch: Any) -> None:
    """Override PythonWrapperCodegen.codegen_switch: write a call that runs one branch, or captures both."""
    import torch._inductor.config as inductor_config
    from torch._inductor.virtualized import V

    is_python = not (V.graph.cpp_wrapper or V.graph.aot_mode or V.graph.fx_wrapper)
    asked = is_python and switch.is_cond and inductor_config.triton.cudagraphs
    if not asked or not _is_inside(V.graph.scheduler, switch):
        original(wrapper, switch)
        return
    for branch in switch.branches:
        wrapper.codegen_subgraph_common(branch)
        wrapper.pop_codegened_graph()
    root, name = wrapper, switch.get_name()
    while hasattr(root, "parent_wrapper"):
        root = root.parent_wrapper
    if not root.imports.contains(RUNTIME):
        root.imports.writeline(RUNTIME)
    given = ", ".join(each.codegen_reference() for each in (switch.selector, *switch.operands))
    functions = ", ".join(branch.graph.name for branch in switch.branches)
    wrapper.writeline(f"{name}_args = [{given}]")
    V.graph.scheduler.free_buffers()
    wrapper.writeline(f"{name} = choose({name}_args, {functions})")
