"""Moves the branches of a captured graph into conditional nodes.

Note [Branches in a graph]
The host of a program with `torch.cond` reads the predicate, and runs one branch. In a graph the device chooses, by a
conditional node: a node with two graphs, of which a launch runs one. Generated code calls `capture.branches.choose`,
which runs as the program does outside of a capture. In a capture it captures the kernel that reads the predicate (the
setter), then both branches, one after the other, on the same stream. So up to its executable, a graph with conditions
is a list of nodes as any other, in which each pointer is proven, whichever branch it is in. Five rules come with it:

1. Both branches write their results to one memory. Where the two tensors are allocations of generated code, equal in
   size and layout, the second one's addresses stand for the first one's region; else its values are copied there at
   the end of the branch. The region lives from the first branch on, so it shares no memory with anything in the second.
2. Memory is shared as if both branches ran, one after the other. That is more than either of them needs: operands are
   held until the last of them is over, and a launch that leaves one out only touches less.
3. Nodes of a branch stay together: no edge is removed between a branch and what is around it, no stage begins inside.
4. Before the graph is instantiated (`nested`), conditional nodes are added to it, and the nodes of branches are copied
   there. An edge into a branch, or out of it, becomes one of the conditional node; one between the branches goes.
   Nodes in there are patched like others.
5. The setter is a kernel of torch's, which is found in a capture of torch's own with such a node (`find_setter`). It is
   captured without a handle of a condition, which belongs to a graph, and gets that here.

Only kernels may be in a branch. It draws no random numbers, since a launch advances the generators by the numbers of
both. The module `conditions` splits off all conditions with other work in a branch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from typing import Any, NamedTuple, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.graph.driver import KernelLaunch
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.graph.driver import Driver
    from torch_overlay._inductor.relaunch.proof.nodes import Conditional, KernelNode, Template

    Path = tuple[tuple[int, int], ...]  # (conditional, branch) from the outermost to the innermost


class Setter(NamedTuple):
    """The kernel that sets a condition. `handle`: which of its two arguments is the condition's handle."""

    launch: KernelLaunch
    handle: int

    def of(self, predicate: int) -> KernelLaunch:
        """Return a launch that reads the predicate, a boolean at this address, for no condition yet."""
        values = bytes(8), predicate.to_bytes(8, "little")
        return self.launch._replace(arguments=values[::-1] if self.handle else values)


def find_setter(stream: torch.cuda.Stream, driver: Driver) -> Setter:
    """Return the setter, from a capture on this stream. Raises Unprovable where there are no conditional nodes."""
    predicate = torch.zeros((), dtype=torch.bool, device=stream.device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                graph.begin_capture_to_if_node(predicate)
                graph.end_capture_to_conditional_node()
            finally:
                graph.capture_end()
        nodes, kinds, _ = driver.structure(graph.raw_cuda_graph())
        (node,) = [node for node, kind in zip(nodes, kinds, strict=True) if kind == cu.KERNEL]
        func, kern, _, grid, block, shared_bytes, _, values = driver.kernels([node])[0]
        addresses = [int.from_bytes(value, "little") == predicate.data_ptr() for _, value in values]
        if [len(value) for _, value in values] != [8, 8] or sum(addresses) != 1:
            raise RuntimeError(f"torch's kernel that sets a condition has other parameters: {values}")
        func = func or int(driver.call("cuKernelGetFunction", driver.api.CUkernel(kern)))
        return Setter(KernelLaunch(func, grid, block, shared_bytes, ()), addresses.index(False))
    except (RuntimeError, AttributeError, ValueError) as error:
        raise Unprovable("condition", f"a graph can't choose between branches here: {error}") from error
    finally:
        with contextlib.suppress(RuntimeError):
            graph.reset()


def nested(driver: Driver, graph: int, template: Template, setter: Setter) -> Template:
    """Move the branches of a graph into conditional nodes, and return the template with the nodes' new handles."""
    handles = {node.index: node.handle for node in template.nodes}
    conditionals = [each.renamed(handles.__getitem__) for each in template.conditionals]
    by_handle: dict[int, Any] = {node.handle: node for node in template.nodes}
    made = _nest(driver, graph, conditionals, by_handle, setter)
    nodes = (dataclasses.replace(node, handle=made.get(handle, handle)) for handle, node in by_handle.items())
    return dataclasses.replace(template, nodes=tuple(nodes))


def _nest(
    driver: Driver, graph: int, conditionals: Sequence[Conditional], nodes: dict[int, KernelNode], setter: Setter
) -> dict[int, int]:
    """Return node -> the one in its place. The setters among `nodes`, by their handles, get their arguments."""
    old = driver.structure(graph).edges
    path: dict[int, Path] = {}
    for number, each in enumerate(conditionals):  # an outer one comes first
        for branch, body in enumerate(each.branches):
            path |= {node: (*path.get(node, ()), (number, branch)) for node in body}
    graphs: dict[Path, int] = {(): graph}
    chooser: dict[int, int] = {}  # conditional -> its node
    made: dict[int, int] = {}
    new: defaultdict[Path, set[tuple[int, int]]] = defaultdict(set)
    for number, each in enumerate(conditionals):
        at = path.get(each.setter, ())
        handle, chooser[number], bodies = driver.add_conditional(graphs[at])
        graphs |= {(*at, (number, branch)): body for branch, body in enumerate(bodies)}
        parameters = list(nodes[each.setter].parameters)
        parameters[setter.handle] = parameters[setter.handle][0], handle.to_bytes(8, "little")
        nodes[each.setter] = dataclasses.replace(nodes[each.setter], parameters=tuple(parameters))
        launch = setter.launch._replace(arguments=tuple([value for _, value in parameters]))
        made[each.setter] = driver.add_kernel(graphs[at], [], launch)
        new[at].add((made[each.setter], chooser[number]))
    made |= {node: driver.copy_kernel(graphs[path[node]], node) for node in nodes if node in path and node not in made}
    for u, v, _ in old:
        if u not in made and v not in made:
            continue
        a, b = path.get(u, ()), path.get(v, ())
        depth = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        ends = [made.get(n, n) if len(p) == depth else chooser[p[depth][0]] for n, p in ((u, a), (v, b))]
        if ends[0] != ends[1]:
            new[a[:depth]].add((ends[0], ends[1]))
    for node in made:
        driver.destroy(node)
    for at, edges in new.items():
        driver.add_edges(graphs[at], sorted(edges))
    return made
