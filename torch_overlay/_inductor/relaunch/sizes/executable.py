"""Describes an executable graph that serves several sizes, and says whether another capture may use it.

`cuGraphExecKernelNodeSetParams` changes a node's function, grid, shared memory and parameters. It changes neither the
edges nor what else a kernel is launched with, its attributes (clusters, priority). So another capture fits if all this
is the same. With other attributes it can only launch its kernels one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING, TypeAlias

from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement
    from torch_overlay._inductor.relaunch.proof.nodes import Node

Attributes: TypeAlias = "tuple[bytes, ...]"  # of each kernel node


@dataclass(frozen=True)
class Shape:
    """What an executable can't change, but for attributes of kernels. `fixed`: addresses of the state of random
    generators, and `drawn`: how many numbers a launch draws, which is torch's to fill in."""

    kinds: tuple[Any, ...]
    edges: tuple[tuple[int, int], ...]
    partial: tuple[tuple[int, int], ...]
    fixed: tuple[int, ...]
    drawn: tuple[int, ...]

    @staticmethod
    def of(graph: CapturedGraph, fixed: Any, drawn: tuple[int, ...]) -> Shape:
        return Shape(tuple(map(_kind, graph.nodes)), graph.edges, graph.partial, tuple(fixed), drawn)


def _kind(node: Node) -> Any:
    return (KernelNode, node.ctx) if isinstance(node, KernelNode) else type(node)


def attributes_of(graph: CapturedGraph) -> Attributes:
    return tuple([node.attributes for node in graph.nodes if isinstance(node, KernelNode)])


@dataclass(eq=False)
class Executable:
    """An executable graph, or one for each stage, with the arrangement that it was made for. `is_uncut`: it was to have
    stages, and the driver could not cut the graph."""

    shape: Shape
    attributes: Attributes
    arrangement: Arrangement
    launchers: list[Any]
    is_uncut: bool = False

    @property
    def can_launch_by_node(self) -> bool:
        """True if the kernels can be launched one by one."""
        return all(getattr(launcher.shared, "launches", None) is not None for launcher in self.launchers)

    def fits(self, arrangement: Arrangement) -> bool:
        """True if these are the stages of the executable."""
        return [stage.nodes for stage in arrangement.stages] == [stage.nodes for stage in self.arrangement.stages]
