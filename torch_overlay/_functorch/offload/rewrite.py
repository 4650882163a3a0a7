"""Moves saved activations to the host: reads the partitioned graphs for the plan, and rewrites them as it says.

The partitioner has made a forward and a backward. A candidate is a saved tensor that nobody else holds: made by an
operation on the caller's stream, whole and dense, of static size. The forward may save views of it; they are made again
in the backward. `offload.plan` chooses among the candidates. Then

    forward     the slab is taken first; each chosen tensor is stored in it; the slab is saved in place of them all
    backward    the slab is its input; each tensor is loaded where it is first needed, or computed again from others

Where copies are launched is decided later, on Inductor's final schedule (`_inductor.offload.schedule`), by the budget,
which the nodes carry as `custom["offload_budget"]`.
"""

from __future__ import annotations

import itertools
import logging
import operator
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.pattern_matcher import stable_topological_sort

from torch_overlay import config
from torch_overlay._functorch.offload import kernel_times, log as offload_log, ops
from torch_overlay._functorch.offload.checkpoint_policies import MUST, OFFLOAD
from torch_overlay._functorch.offload.cost_model import Candidate, Model, Recompute, Step
from torch_overlay._functorch.offload.device_rates import Rates, rates
from torch_overlay._functorch.offload.plan import Choice, choose
from torch_overlay._functorch.offload.reader import (
    ALSO_POINTWISE,
    is_dense,
    is_pointwise,
    is_static,
    nbytes,
    Reader,
    tensor_of,
)
from torch_overlay._functorch.streams import ids
from torch_overlay._functorch.streams.facts import Fact, replace_fact
from torch_overlay._functorch.streams.fx import node_stream, place_on, viewed
from torch_overlay._functorch.streams.tokens import CALLER


if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    from torch_overlay._functorch.offload.settings import Settings

log = logging.getLogger(__name__)

DEVICE_TYPE = "cuda"
MOST_RECOMPUTED = 24  # nodes that are run again for one value
LAUNCH_US = 5.0


# ---- the graphs


@dataclass
class Saved:
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
        results = {viewed(n) for n in self.outputs[:count] if isinstance(n, torch.fx.Node)}
        mutated = {viewed(a) for n in forward.graph.nodes if _writes(n) for a in n.all_input_nodes}
        self.saved: dict[Node, Saved] = {}
        self.refused: dict[Node, str] = {}
        for node in self.outputs[count:]:
            value = tensor_of(node)
            if value is None or value.device.type != DEVICE_TYPE or node.name not in self.inputs:
                continue
            owner = viewed(node)
            if owner.op == "call_function":
                self.saved.setdefault(owner, Saved(owner)).members.append(node)
        for owner, saved in list(self.saved.items()):
            if (why := self.why_not(saved, results, mutated)) is not None:
                self.refused[owner] = why
        self.device = next((s.value.device for o, s in self.saved.items() if o not in self.refused), None)
        for owner, saved in self.saved.items():
            if owner not in self.refused and saved.value.device != self.device:
                self.refused[owner] = "it is on another device"

    def why_not(self, saved: Saved, results: set[Node], mutated: set[Node]) -> str | None:
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
        if any(node_stream(n) for n in (saved.node, *saved.members)):
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
            if not (is_pointwise(current) or current.target in ALSO_POINTWISE or viewed(current) is not current):
                return False
            if not all(map(visit, current.all_input_nodes)):
                return False
            found[current] = None
            return True

        return list(found) if visit(node) else None

    def again(self, saved: Saved, known: Rates) -> Recompute | None:
        recipe = self.recipe(saved.node)
        if recipe is None or not all(is_static(t) for n in recipe if (t := tensor_of(n)) is not None):
            return None
        inside = set(recipe)
        read = {viewed(a) for n in recipe for a in n.all_input_nodes if a not in inside}
        moved = nbytes(saved.value) + sum(nbytes(t) for n in read if (t := tensor_of(n)) is not None)
        return Recompute(moved / known.bytes + LAUNCH_US, frozenset(n.name for n in read if n in self.saved))

    def model(self, candidates: list[Candidate], known: Rates) -> Model:
        assert self.device is not None
        kept = {n for n in self.outputs if isinstance(n, torch.fx.Node)} | {viewed(n) for n in self.saved}
        times = (
            kernel_times.measure([*self.forward.graph.nodes, *self.backward.graph.nodes], self.device.index or 0)
            if (known.measured)
            else {}
        )
        forward = Reader(self.forward.graph, kept | {viewed(n) for n in kept}, known, self.device, times)
        names = {m.name: owner.name for owner, saved in self.saved.items() for m in saved.members}
        (output,) = self.backward.graph.find_nodes(op="output")
        gradients = {viewed(n) for n in torch.utils._pytree.tree_leaves(output.args[0]) if isinstance(n, torch.fx.Node)}
        backward = Reader(self.backward.graph, gradients, known, self.device, times)
        steps = [Step(s.name, s.us, s.makes, frozenset(names.get(r, r) for r in s.reads)) for s in backward.steps]
        results = {viewed(n).name for n in self.outputs[: self.count] if isinstance(n, torch.fx.Node)}
        saved = {owner.name: nbytes(s.value) for owner, s in self.saved.items()}
        at_once = holds_memory_at_once()
        return Model(forward.steps, steps, saved, results | {n.name for n in gradients}, candidates, at_once)

    # -- rewriting

    def rewrite(self, choice: Choice, budget: int, strict: bool) -> int:
        """Rewrite both graphs, and return the bytes of the slab. `strict` says whether the slab must be pinned."""
        from torch_overlay._functorch.offload.runtime import ALIGNMENT

        by_name = {owner.name: saved for owner, saved in self.saved.items()}
        picked = [by_name[name] for name in choice.chosen]
        again = [by_name[name] for name in choice.recomputed]
        offsets = list(itertools.accumulate((-(-nbytes(s.value) // ALIGNMENT) * ALIGNMENT for s in picked), initial=0))
        assert self.device is not None
        slab = self.store(picked, offsets, ids.written_index(self.device.index or 0), budget, strict)
        self.drop_outputs({m for saved in (*picked, *again) for m in saved.members}, slab)
        made = self.load(picked, offsets, slab, budget)
        self.compute_again(again, made)
        for saved in (*picked, *again):
            for member in saved.members:
                self.backward.graph.erase_node(self.inputs.pop(member.name))
        self.name_owners()
        stable_topological_sort(self.backward.graph)
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()
        return offsets[-1]

    def name_owners(self) -> None:
        """Name the tensor that several inputs are views of: they share its memory, which the schedule counts once."""
        for owner, saved in self.saved.items():
            inputs = [self.inputs[m.name] for m in saved.members if m.name in self.inputs]
            for node in inputs if len(inputs) > 1 else ():
                node.meta["custom"] = {**node.meta.get("custom", {}), ops.OWNER: owner.name}

    def store(self, picked: list[Saved], offsets: list[int], device: int, budget: int, strict: bool) -> Node:
        graph = self.forward.graph
        first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
        with graph.inserting_before(first):
            slab = graph.call_function(ops.SLAB, (offsets[-1], device, strict))
        mode = picked[0].value.fake_mode  # type: ignore[attr-defined]
        with mode:
            slab.meta["val"] = torch.empty(offsets[-1], dtype=torch.uint8)
        for saved, offset in zip(picked, offsets):
            with graph.inserting_before(_behind(saved.node)):
                node = graph.call_function(ops.STORE, (slab, saved.node, offset))
            node.meta["val"] = None
            _place(node, ids.copy_out_stream(device), saved.node, budget)
        return slab

    def drop_outputs(self, members: set[Node], slab: Node) -> None:
        """Replace the first of the saved `members` by the slab, drop the rest; other outputs keep their order."""
        self.place_of_slab = self._first_saved(members)
        outputs, described = [], []
        desc = self.output.meta.get("desc", ())
        desc = list(desc) if len(desc) == len(self.outputs) else [None] * len(self.outputs)
        for i, value in enumerate(self.outputs):
            is_moved = i >= self.count and value in members
            if i == self.place_of_slab:
                outputs.append(slab)
                described.append(desc[i])
            if not is_moved:
                outputs.append(value)
                described.append(desc[i])
        self.output.args = (tuple(outputs),)
        if None not in described:
            self.output.meta["desc"] = described

    def _first_saved(self, members: set[Node]) -> int:
        return next(i for i, value in enumerate(self.outputs) if i >= self.count and value in members)

    def load(self, picked: list[Saved], offsets: list[int], slab: Node, budget: int) -> dict[Node, Node]:
        """Load the picked tensors in the backward. Return the backward's node for each node of the forward."""
        graph = self.backward.graph
        replaced = self.outputs[self.place_of_slab]
        made: dict[Node, Node] = {}
        with graph.inserting_before(self.inputs[replaced.name]):
            handle = graph.placeholder(slab.name)
        handle.meta["val"] = slab.meta["val"]
        position = {n: i for i, n in enumerate(graph.nodes)}
        first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
        with graph.inserting_before(first):
            graph.call_function(ops.IN_USE, (handle,)).meta["val"] = None
        for saved, offset in zip(picked, offsets):
            value = saved.value
            users = [u for m in saved.members for u in self.inputs[m.name].users]
            where = min(users, key=position.__getitem__)
            arguments = (handle, offset, list(value.shape), list(value.stride()), value.dtype, value.device)
            with graph.inserting_before(where):
                node = graph.call_function(ops.LOAD, arguments, name=f"{saved.node.name}_loaded")
                node.meta["val"] = value
                _place(node, ids.copy_in_stream(ids.written_index(value.device.index or 0)), saved.node, budget)
                made[saved.node] = node
                for member in saved.members:
                    self.inputs[member.name].replace_all_uses_with(_copied(graph, member, made))
        return made

    def compute_again(self, again: list[Saved], made: dict[Node, Node]) -> None:
        graph = self.backward.graph
        position = {n: i for i, n in enumerate(graph.nodes)}
        names = {m.name for saved in again for m in saved.members}
        for saved in again:
            users = [u for m in saved.members for u in self.inputs[m.name].users]
            with graph.inserting_before(min(users, key=position.__getitem__)):
                for node in self.recipe(saved.node) or ():
                    for argument in node.all_input_nodes:
                        if argument.name in self.inputs and argument.name not in names:
                            made.setdefault(argument, self.inputs[argument.name])
                    _copied(graph, node, made)
                for member in saved.members:
                    self.inputs[member.name].replace_all_uses_with(_copied(graph, member, made))


def _copied(graph: Graph, node: Node, made: dict[Node, Node]) -> Node:
    """Copy a node of the forward into the backward, with the nodes that lead to it, but without its placement on the
    user's streams, which holds in the forward only."""
    if node not in made:
        for argument in node.all_input_nodes:
            _copied(graph, argument, made)
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {key: value for key, value in node.meta.items() if key not in ("recompute", OFFLOAD)}
        custom = {k: v for k, v in node.meta.get("custom", {}).items() if not k.startswith("stream")}
        made[node].meta["custom"] = custom
    return made[node]


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _behind(node: Node) -> Node:
    """Return the next node after `node` and after the `getitem`s of its output that follow it directly."""
    following = node.next
    while following.target is operator.getitem and following.args[0] is node:
        following = following.next
    return following


def _place(node: Node, stream: int, saved: Node, budget: int) -> None:
    for key in ("stack_trace", "nn_module_stack", "original_aten"):
        if key in saved.meta:
            node.meta[key] = saved.meta[key]
    node.meta["custom"] = {ops.BUDGET: budget, ops.VALUE: saved.name}
    place_on(node, stream)
    replace_fact(node, Fact(after=(CALLER,), before=(CALLER,)))


def holds_memory_at_once() -> bool:
    """True if CUDA graphs are asked for: a launch holds the memory of all its inputs and results until it has ended."""
    return bool(inductor_config.triton.cudagraphs) and config.cudagraphs != "off"


# ---- the decision


def offload(forward: GraphModule, backward: GraphModule, count: int, wanted: Settings | None) -> None:
    """Rewrite the graphs if the option or a checkpoint policy asks for it. Raise OffloadError if the option is strict
    and its budget can't be met, or if the host lacks the memory and the option is strict or a policy alone asks."""
    pair = Pair(forward, backward, count)
    least = wanted.min_bytes if wanted is not None else 1 << 62
    known = rates(pair.device.index or 0) if pair.device is not None else None
    candidates = pair.candidates(least, known) if known is not None else []
    for owner, why in pair.refused.items():
        if any(n.meta.get(OFFLOAD) == MUST for n in (owner, *pair.saved[owner].members)):
            log.warning("%s stays on the device, though it was asked to go to the host: %s", owner, why)
    if known is None or wanted is None and not candidates:
        return
    budget = _budget(wanted, forward, backward, pair)
    choice = choose(pair.model(candidates, known), budget, known.link)
    if wanted is not None and choice.peak > budget and not _tolerates(wanted, choice, budget, pair):
        return
    if not choice.chosen:
        return
    from torch_overlay._functorch.offload.runtime import check_host_memory, OffloadError

    try:
        check_host_memory(choice.nbytes)
    except OffloadError as error:
        if wanted is None or wanted.strict:
            raise
        log.warning("%s Training goes on without offload.", error)
        return
    limit = max(budget, choice.peak) if wanted is not None else choice.peak
    size = pair.rewrite(choice, limit, wanted is None or wanted.strict)
    offload_log.publish(_report(pair, choice, budget, size, known))


def _budget(wanted: Settings | None, forward: GraphModule, backward: GraphModule, pair: Pair) -> int:
    if wanted is None:
        return 1 << 62  # only what policies ask for is offloaded
    if wanted.budget is not None:
        return wanted.budget
    return free_bytes(pair.device, _parameter_bytes(backward))


def _parameter_bytes(backward: GraphModule) -> int:
    """Return the bytes of the gradients: an optimizer may allocate twice as much after the first step."""
    (output,) = backward.graph.find_nodes(op="output")
    values = [tensor_of(n) for n in torch.utils._pytree.tree_leaves(output.args[0])]
    return sum(nbytes(v) for v in values if v is not None)


def free_bytes(device: torch.device | None, reserve: int) -> int:
    """Return the bytes that the device has free, with the allocator's cached memory; less a tenth, and less twice the
    `reserve`, for an optimizer's state that may not be allocated yet."""
    free, total = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = min(free + unused, int(total * fraction) - torch.cuda.memory_allocated(device))
    return max(0, int(0.9 * allowed) - 2 * reserve)


def _tolerates(wanted: Settings, choice: Choice, budget: int, pair: Pair) -> bool:
    """True to offload as much as possible, though it is not enough. Raise OffloadError if the budget is strict."""
    from torch_overlay._functorch.offload.host_memory import size_text
    from torch_overlay._functorch.offload.runtime import OffloadError

    reasons = sorted({why for why in pair.refused.values()})
    rest = f" Not offloaded: {len(pair.refused)} saved tensors ({'; '.join(reasons)})." if reasons else ""
    text = (
        f"torch_overlay: a budget of {size_text(budget)} is too small for this function: with every saved activation "
        f"that can go to the host there, its forward and backward hold {size_text(choice.least)} at their peak "
        f"({size_text(choice.peak_before)} without offload).{rest} Set budget_gb in "
        f"torch_overlay.config.activation_offload to {choice.least / 1e9:.4g} or more, or make the batch smaller."
    )
    if wanted.budget is None:  # "auto": as far as possible
        log.warning("%s As much as can be is offloaded.", text)
        return True
    if wanted.strict:
        raise OffloadError(text)
    log.warning("%s Training goes on without offload.", text)
    return False


def _report(pair: Pair, choice: Choice, budget: int, size: int, known: Rates) -> offload_log.Report:
    by_name = {owner.name: saved for owner, saved in pair.saved.items()}
    rows = []
    for name in choice.chosen:
        node = by_name[name].node
        rows.append(offload_log.Row(name, nbytes(by_name[name].value), str(node.meta.get("stack_trace") or "")))
    return offload_log.Report(tuple(rows), choice, budget, size, known)
