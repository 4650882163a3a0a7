"""Keeps what a region has learned from its sizes: `Sizes`.

Note [Sizes that share an executable]
The first few sizes of a region have executables of their own, whose nodes may run side by side. Further sizes share
executables: a capture of a new size gives the parameters of each node, and a launch sets the nodes that the executable
holds otherwise, or launches the kernels one by one (`csrc/launch_nodes.c`). Such a size takes memory of the host only.
Nothing is instantiated, and a second capture is made only for functions that were not seen before (`functions`). A
graph with other nodes or edges gets another executable; a region has at most `bound` shared ones, and drops the one
that was made for a size or chosen for one the longest time ago, with the graphs of its sizes.

Libraries choose clusters and the number of kernels by size, too, which a launch can't change. So a region may have as
many shapes as sizes, and to instantiate a graph takes longer than a call. Where kernels can be launched one by one,
`MOST` executables are made; a graph that fits none of them does without one.

Describes an executable graph that serves several sizes, and says whether another capture may use it.

`cuGraphExecKernelNodeSetParams` changes a node's function, grid, shared memory and parameters. It changes neither the
edges nor what else a kernel is launched with (clusters, priority). So another capture fits if all this is the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.memory.arrange import arrange
from torch_overlay._inductor.relaunch.proof.functions import Functions
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode
from torch_overlay.orders import only_order


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_overlay._inductor.relaunch.capture.capture import Captured
    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement, Proven
    from torch_overlay._inductor.relaunch.proof.nodes import Node, Template


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


OWN = 4  # so many sizes have executables of their own
MOST = 4  # so many executables are shared, where kernels can be launched one by one
FITTED = 2  # after so many graphs in a row that needed no executable, the next one will hardly need one
DIFFERED = 4  # after so many captures in a row from which no call could be left out, none is left out any more


class NoExecutable(Exception):
    """No executable has the nodes of a graph that can't be instantiated."""


class Sizes:
    """Sizes of one region. A `state` is what the region has for a size: `relaunch`, its graph or None;
    `needs_own_executable`, whether the driver can't set a shared executable to its graph."""

    def __init__(self, bound: int) -> None:
        self.functions = Functions()
        self.executables: list[Executable] = []  # the latest first
        self.bound = bound
        self.instantiated = 0  # executables so far
        self.fitted = 0  # so many graphs in a row used executables that there were
        self.differed = 0
        self.goes_by_node = False  # the latest graph that fitted no executable does without one
        self.stage_cuts: dict[int, tuple[int, ...]] = {}  # where graphs without one are cut, by the number of nodes

    def is_shared(self, state: Any, states: Iterable[Any]) -> bool:
        """True if the state's graph is to share an executable."""
        if not self.bound or state.needs_own_executable:
            return False
        others = (other for other in states if other is not state and other.relaunch is not None)
        return len(list(itertools.islice(others, OWN))) == OWN

    def launchers(
        self, device: Cuda, captured: Captured, graph: CapturedGraph, proven: Proven, drawn: tuple[int, ...]
    ) -> tuple[Arrangement, list[Any]]:
        """Return an arrangement of the captured graph, and launchers that follow it: of an executable that the graph
        fits, without one, or of a new one. Raises NoExecutable if there must be a new one, and calls were left out of
        the capture."""
        shape = Shape.of(graph, captured.recording.fixed, drawn)
        for executable in self.executables:
            if executable.shape != shape:
                continue
            arrangement = arrange(proven, executable.arrangement.stage_cuts)
            if executable.is_uncut:
                arrangement = arrangement.whole or arrangement
            if executable.fits(arrangement):
                self.executables.remove(executable)
                self.executables.insert(0, executable)
                self.fitted += 1
                templates = _templates(arrangement)
                return arrangement, [a.with_template(t) for a, t in zip(executable.launchers, templates, strict=True)]
        order = device.order_of(captured, graph)
        self.goes_by_node = order is not None and len(self.executables) >= min(MOST, self.bound)
        if order is not None and self.goes_by_node:
            count = len(graph.nodes)
            arrangement = arrange(proven, self.stage_cuts.get(count, ()))
            self.stage_cuts[count] = arrangement.stage_cuts
            return arrangement, [device.by_node(template, order) for template in _templates(arrangement)]
        if captured.repeats:
            raise NoExecutable("no executable has these nodes")
        wanted = arrange(proven)
        arrangement, launchers = device.instantiate(captured, wanted, varies=graph)
        self.instantiated += 1
        self.fitted = 0
        is_uncut = len(arrangement.stages) < len(wanted.stages)
        self.executables.insert(0, Executable(shape, arrangement, launchers, is_uncut))
        del self.executables[self.bound :]
        return arrangement, launchers

    def may_leave_out(self) -> bool:
        """True if calls may be left out of the capture of a further size, for its graph will hardly have to be
        instantiated."""
        return self.differed < DIFFERED and (self.goes_by_node or self.fitted >= FITTED)

    def note_left_out(self, worked: bool) -> None:
        """Note whether calls could be left out of a capture."""
        self.differed = 0 if worked else self.differed + 1

    def numbers_of(self, nodes: Sequence[Node]) -> Sequence[int]:
        """Return the numbers of nodes in the order of the stream, as an executable has them that can be set to them; if
        there is none, nothing."""
        kinds = list(map(kind_of, nodes))
        for executable in self.executables:
            shape = executable.shape
            order = only_order(len(kinds), shape.edges) if len(shape.kinds) == len(kinds) else None
            if order is not None and [shape.kinds[number] for number in order] == kinds:
                return order
        return ()

    def keeps(self, shared: Any) -> bool:
        """True if the executable that is shared by this is still kept."""
        return any(kept.launchers[0].shared is shared for kept in self.executables)


def _templates(arrangement: Arrangement) -> list[Template]:
    return [stage.template for stage in arrangement.stages] or [arrangement.template]
