"""Patches the memcpy nodes of a captured graph: the copies between the device and pinned host memory.

A copy engine does a copy between device and host beside the kernels, so it remains the memcpy node that was captured.
(Copies within the device become kernels: `graph.tidy`.)

Note [The memory that a memcpy node was made for]
1. The driver patches a memcpy node of an executable only if the new memory is of the same kind as the node's memory
   when the executable was instantiated. A capture's addresses map one small block many times over, which no tensor's
   memory does. So before the executable is instantiated, `settle` points these nodes at any ordinary memory.
2. If the driver still refuses, at the first launch or a later one, `Patcher.rebuild` patches the nodes in the graph
   itself, which always works, and instantiates the executable again. That is correct and slow: a region for which it
   happens `MOST_REBUILDS` times runs without a graph from then on, and says why.
3. A copy of several rows can never be patched in an executable, so it is rebuilt from the start.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, TYPE_CHECKING

from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.graph.native_read import NativeDriver
from torch_overlay._inductor.relaunch.launch import native
from torch_overlay._inductor.relaunch.proof.nodes import CopyNode, FIXED, Template


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torch_overlay._inductor.relaunch.graph.driver import Driver

log = logging.getLogger(__name__)

MOST_REBUILDS = 16
REFUSED = "cuGraphExecMemcpyNodeSetParams"  # stands in the error if the driver refuses to patch a copy
DESTINATION, SOURCE = 0, 1  # parameters of a CopyNode


def moving(template: Template) -> dict[CopyNode, set[int]]:
    """Return the memcpy nodes that a launch may have to patch, each with its parameters that are pointers."""
    nodes = {node.index: node for node in template.nodes if isinstance(node, CopyNode)}
    found: dict[CopyNode, set[int]] = {}
    for slot in template.slots if nodes else ():
        if slot.node in nodes and slot.region != FIXED:
            found.setdefault(nodes[slot.node], set()).add(slot.parameter)
    return found


def is_linear(node: CopyNode) -> bool:
    return node.height <= 1 and node.depth <= 1


def extent(node: CopyNode, parameter: int) -> int:
    """Return the bytes that one side of the copy spans, from its first byte to its last."""
    pitch, rows = (node.dst_pitch, node.dst_height) if parameter == DESTINATION else (node.src_pitch, node.src_height)
    height, depth = max(node.height, 1), max(node.depth, 1)
    return node.width + pitch * (height - 1 + rows * (depth - 1))


def settle(
    template: Template, empty: Callable[[int], torch.Tensor], driver: Driver | None = None
) -> torch.Tensor | None:
    """Point the memcpy nodes of a graph at ordinary memory, before the graph is instantiated or cloned. Return that
    memory, which has to live until the graph is instantiated. `empty(nbytes)` allocates it."""
    nodes = moving(template)
    if not nodes:
        return None
    driver = driver or NativeDriver()
    # Two halves, for the two ends of a copy.
    half = max(extent(node, parameter) for node, parameters in nodes.items() for parameter in parameters)
    half = -(-half // 512) * 512
    memory = empty(2 * half)
    for node, parameters in nodes.items():
        addresses = {p: memory.data_ptr() + p * half for p in parameters}
        driver.set_memcpy(node.handle, pointed(node, addresses))
    return memory


def pointed(node: CopyNode, addresses: dict[int, int]) -> CopyNode:
    """Return the node with these addresses, by parameter, in place of its own."""
    return dataclasses.replace(node, dst=addresses.get(DESTINATION, node.dst), src=addresses.get(SOURCE, node.src))


class Patcher:
    """Patches an executable that has copies. `graph` has `instantiate()`, which replaces its executable, and
    `raw_cuda_graph_exec()`. `given_up(message)` is called when the executable has been rebuilt too often, until it
    returns True."""

    given_up: Callable[[str], bool] | None = None

    def __init__(
        self,
        graph: Any,
        template: Template,
        *,
        upload: Callable[[Any], None],
        synchronize: Callable[[], None],
        driver: Driver | None = None,
        make: Callable[..., Any] | None = None,
    ) -> None:
        self.graph, self.template, self.driver = graph, template, driver
        self.upload, self.synchronize = upload, synchronize
        self.make = make or native.implementation().Exec
        self.copies = tuple(moving(template))
        of_copies = {node.index for node in self.copies}
        self.copy_slots = [s for s in template.slots if s.node in of_copies and s.region != FIXED]
        self.other_slots = tuple(s for s in template.slots if s.node not in of_copies)
        self.bases: list[int | None] = [None] * template.regions
        self.rebuilds = 0
        self.placed: dict[CopyNode, dict[int, int]] = {}  # addresses of the copies in the rebuilt executable
        self.by_graph = not all(map(is_linear, self.copies))
        self.exec = self._exec()

    def _exec(self) -> Any:
        slots = self.other_slots if self.by_graph else self.template.slots
        return self.make(self.graph.raw_cuda_graph_exec(), self.template.nodes, slots, self.template.regions)

    def patch(self, bases: Sequence[Any], regions: Sequence[int] | None = None) -> int:
        """Write the bases, as `native.Exec.patch` does; rebuild the executable if the driver refuses a copy."""
        for region, base in zip(range(self.template.regions) if regions is None else regions, bases):
            if base is not None:
                self.bases[region] = base if isinstance(base, int) else base.data_ptr()
        if not self.by_graph:
            try:
                return self.exec.patch(bases, regions)
            except RuntimeError as error:
                if REFUSED not in str(error):
                    raise
                log.info("a graph is instantiated anew, for its copies can't be pointed elsewhere: %s", error)
                self.by_graph, self.why = True, str(error)
        elif self.wanted() == self.placed:
            return self.exec.patch(bases, regions)
        return self.rebuild()

    why = "a copy of several rows can't be pointed at other memory"

    def wanted(self) -> dict[CopyNode, dict[int, int]]:
        """Return the addresses that the copies need for the current bases, by node and parameter."""
        by_index = {node.index: node for node in self.copies}
        found: dict[CopyNode, dict[int, int]] = {}
        for slot in self.copy_slots:
            if (base := self.bases[slot.region]) is None:
                raise ValueError(f"region {slot.region} has no base yet")
            found.setdefault(by_index[slot.node], {})[slot.parameter] = base + slot.delta
        return found

    def rebuild(self) -> int:
        """Instantiate again: Note [The memory that a memcpy node was made for], 2. Return the number of nodes set."""
        self.driver = self.driver or NativeDriver()
        wanted = self.wanted()
        for node, addresses in wanted.items():
            self.driver.set_memcpy(node.handle, pointed(node, addresses))
        self.placed = {}  # the old executable is gone, even if there is no new one
        self.synchronize()  # it may be running
        self.graph.instantiate()
        self.upload(self.graph)
        self.placed = wanted
        self.exec = self._exec()
        self.rebuilds += 1
        counters["torch_overlay"]["cudagraph_rebuilds"] += 1
        if self.rebuilds >= MOST_REBUILDS and self.given_up is not None:
            why = f"its copies moved {self.rebuilds} times, and each time it was made anew: {self.why}"
            self.given_up = None if self.given_up(why) else self.given_up
        return self.exec.patch(self.bases) + len(self.copies)
