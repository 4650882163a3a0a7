"""Finds the saved tensors that can go to the host, and reads the partitioned graphs for the plan.

The partitioner has made a forward and a backward. A candidate is a saved tensor that nobody else holds: made by an
operation on the caller's stream, whole and dense, of static size. The forward may save views of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch.partitioners import is_rng_op

from torch_overlay._functorch.offload import kernel_times
from torch_overlay._functorch.offload.checkpoint_policies import OFFLOAD
from torch_overlay._functorch.offload.cost_model import Candidate, Model, Recompute, Step
from torch_overlay._functorch.offload.reader import (
    ALSO_POINTWISE,
    is_dense,
    is_pointwise,
    is_static,
    nbytes,
    StepReader,
    tensor_of,
)
from torch_overlay._functorch.streams.fx import has_streams, node_stream, storage_node, updates_operands


if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from torch_overlay._functorch.offload.device_rates import Rates

DEVICE_TYPE = "cuda"
MOST_RECOMPUTED = 24  # nodes that are run again for one value
LAUNCH_US = 5.0


@dataclass
class SavedTensor:
    """A tensor of the forward, and the nodes, itself or views of it, that are saved."""

    node: Node
    members: list[Node] = field(default_factory=list)

    @property
    def value(self) -> torch.Tensor:
        value = tensor_of(self.node)
        assert value is not None
        return value


class Pair:
    """A forward and a backward after the partitioner. The caller gets the first `count` outputs of the forward."""

    def __init__(self, forward: GraphModule, backward: GraphModule, count: int) -> None:
        self.forward, self.backward, self.count = forward, backward, count
        (self.output,) = forward.graph.find_nodes(op="output")
        self.outputs: tuple[Any, ...] = tuple(self.output.args[0])  # type: ignore[arg-type]
        self.inputs = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
        results = {storage_node(n) for n in self.outputs[:count] if isinstance(n, torch.fx.Node)}
        mutated = {
            storage_node(a) for n in forward.graph.nodes if updates_operands(n.target) for a in n.all_input_nodes
        }
        self.saved: dict[Node, SavedTensor] = {}
        self.refused: dict[Node, str] = {}
        for node in self.outputs[count:]:
            value = tensor_of(node)
            if value is None or value.device.type != DEVICE_TYPE or node.name not in self.inputs:
                continue
            owner = storage_node(node)
            if owner.op == "call_function":
                self.saved.setdefault(owner, SavedTensor(owner)).members.append(node)
        for owner, saved in list(self.saved.items()):
            if (why := self.why_not(saved, results, mutated)) is not None:
                self.refused[owner] = why
        self.device = next((s.value.device for o, s in self.saved.items() if o not in self.refused), None)
        for owner, saved in self.saved.items():
            if owner not in self.refused and saved.value.device != self.device:
                self.refused[owner] = "it is on another device"

    def why_not(self, saved: SavedTensor, results: set[Node], mutated: set[Node]) -> str | None:
        value = tensor_of(saved.node)
        if saved.node in results:
            return "the caller gets it, or a view of it"
        if value is None or type(value) is not torch._subclasses.FakeTensor or value.layout is not torch.strided:
            return "it is not a plain tensor"
        if not all(is_static(t) for m in (saved.node, *saved.members) if (t := tensor_of(m)) is not None):
            return "its size is dynamic"
        if not is_dense(value):
            return "it is not dense, or part of other memory"
        if saved.node in mutated:
            return "it is written in place"
        if has_streams((saved.node, *saved.members), None):
            return "it is computed on a side stream"
        if not all(self.inputs[m.name].users for m in saved.members):
            return "the backward doesn't read it"
        return None

    def candidates(self, least: int, known: Rates) -> list[Candidate]:
        found = []
        for owner, saved in self.saved.items():
            asked = any(OFFLOAD in n.meta for n in (owner, *saved.members))
            if owner not in self.refused and (asked or nbytes(saved.value) >= least):
                again = None if asked else self.again(saved, known)
                found.append(Candidate(owner.name, nbytes(saved.value), asked, again))
        return found

    # -- computing again

    def is_at_hand(self, node: Node) -> bool:
        """True if the backward has the value: as an input, or because it or a view of it is saved."""
        return node.name in self.inputs or node in self.saved

    def recipe(self, node: Node) -> list[Node] | None:
        """Return the nodes that compute a saved value from values at hand, in order; None if they aren't all cheap."""
        found: dict[Node, None] = {}

        def visit(current: Node) -> bool:
            if current in found or current is not node and self.is_at_hand(current):
                return True
            if current.op != "call_function" or node_stream(current) or len(found) >= MOST_RECOMPUTED:
                return False
            if is_rng_op(current):  # it would draw other numbers
                return False
            if not (is_pointwise(current) or current.target in ALSO_POINTWISE or storage_node(current) is not current):
                return False
            if not all(map(visit, current.all_input_nodes)):
                return False
            found[current] = None
            return True

        return list(found) if visit(node) else None

    def again(self, saved: SavedTensor, known: Rates) -> Recompute | None:
        recipe = self.recipe(saved.node)
        if recipe is None or not all(is_static(t) for n in recipe if (t := tensor_of(n)) is not None):
            return None
        inside = set(recipe)
        read = {storage_node(a) for n in recipe for a in n.all_input_nodes if a not in inside}
        moved = nbytes(saved.value) + sum(nbytes(t) for n in read if (t := tensor_of(n)) is not None)
        return Recompute(moved / known.bytes + LAUNCH_US, frozenset(n.name for n in read if n in self.saved))

    def model(self, candidates: list[Candidate], known: Rates, at_once: bool) -> Model:
        """Return the steps of both graphs for a plan. `at_once` says whether a launch holds the memory of all its
        inputs and results until it has ended, as that of a CUDA graph does."""
        assert self.device is not None
        kept = {n for n in self.outputs if isinstance(n, torch.fx.Node)} | {storage_node(n) for n in self.saved}
        times = (
            kernel_times.measure([*self.forward.graph.nodes, *self.backward.graph.nodes], self.device.index or 0)
            if known.measured
            else {}
        )
        forward = StepReader(self.forward.graph, kept | {storage_node(n) for n in kept}, known, self.device, times)
        names = {m.name: owner.name for owner, saved in self.saved.items() for m in saved.members}
        (output,) = self.backward.graph.find_nodes(op="output")
        gradients = {
            storage_node(n) for n in torch.utils._pytree.tree_leaves(output.args[0]) if isinstance(n, torch.fx.Node)
        }
        backward = StepReader(self.backward.graph, gradients, known, self.device, times)
        steps = [Step(s.name, s.us, s.makes, frozenset(names.get(r, r) for r in s.reads)) for s in backward.steps]
        results = {storage_node(n).name for n in self.outputs[: self.count] if isinstance(n, torch.fx.Node)}
        saved = {owner.name: nbytes(s.value) for owner, s in self.saved.items()}
        return Model(forward.steps, steps, saved, results | {n.name for n in gradients}, candidates, at_once)
