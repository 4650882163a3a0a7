"""Describes an executable graph that serves several sizes, and says whether another capture may use it.

`cuGraphExecKernelNodeSetParams` changes a node's function, grid, shared memory and parameters. It changes neither the
edges nor what else a kernel is launched with (clusters, priority). So another capture fits if all this is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement
    from torch_overlay._inductor.relaunch.proof.nodes import Node


@dataclass(frozen=True)
class Shape:
    """What an executable can't change. `fixed`: addresses of the state of random generators, and `drawn`: how many
    numbers a launch draws, which is torch's to fill in."""

    kinds: tuple[Any, ...]
    edges: tuple[tuple[int, int], ...]
    partial: tuple[tuple[int, int], ...]
    fixed: tuple[int, ...]
    drawn: tuple[int, ...]

    @staticmethod
    def of(graph: CapturedGraph, fixed: Any, drawn: tuple[int, ...]) -> Shape:
        return Shape(tuple(map(kind_of, graph.nodes)), graph.edges, graph.partial, tuple(fixed), drawn)


def kind_of(node: Node) -> Any:
    return (KernelNode, node.ctx, node.attributes) if isinstance(node, KernelNode) else type(node)


@dataclass(eq=False)
class Executable:
    """An executable graph, or one for each stage, with the arrangement that it was made for. `is_uncut`: it was to have
    stages, and the driver could not cut the graph."""

    shape: Shape
    arrangement: Arrangement
    launchers: list[Any]
    is_uncut: bool = False

    def fits(self, arrangement: Arrangement) -> bool:
        """True if these are the stages of the executable."""
        return [stage.nodes for stage in arrangement.stages] == [stage.nodes for stage in self.arrangement.stages]
