"""Keeps what a region has learned from its sizes: `Sizes`.

Note [Sizes that share an executable]
The first few sizes of a region have executables of their own, whose nodes may run side by side. Further sizes share
executables: a capture of a new size gives the parameters of each node, and a launch sets the nodes that the executable
holds otherwise, or launches the kernels one by one (`csrc/launch_nodes.c`). Such a size takes memory of the host only.
Nothing is instantiated, and a second capture is made only for functions that were not seen before (`functions`). A
graph with other nodes or edges gets another executable; a region has at most `bound` shared ones, and drops the one
that was made for a size or chosen for one the longest time ago, with the graphs of its sizes.

Libraries choose clusters by size, too, which a launch can't change. So a region soon has as many combinations of
clusters as sizes, and to instantiate a graph takes longer than a call. `ALIKE` executables are made that differ in
nothing else; a further size launches its kernels one by one, and none is made for it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.graph.order import only_order
from torch_overlay._inductor.relaunch.memory.arrange import arrange
from torch_overlay._inductor.relaunch.sizes.executable import attributes_of, Executable, Shape
from torch_overlay._inductor.relaunch.sizes.functions import Functions


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay._inductor.relaunch.capture.capture import Captured
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement, Proven
    from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph
    from torch_overlay._inductor.relaunch.sizes.executable import Attributes


OWN = 4  # so many sizes have executables of their own
# So many further sizes are captured at their second call, and more of them as long as captures took few seconds in all.
EAGER = 16
SECONDS = 4.0
ALIKE = 4  # so many executables may differ in attributes of kernels alone
FITTED = 2  # after so many graphs in a row that needed no executable, the next one will hardly need one
DIFFERED = 4  # after so many captures from which no call could be left out, none is left out any more


class NoExecutable(Exception):
    """No executable has the nodes of a graph that can't be instantiated."""


class Sizes:
    """Sizes of one region. A `state` is what the region has for a size: `relaunch`, its graph or None; `spent`, the
    seconds of calls that waited for a capture; `alone`, whether the driver can't set a shared executable to its graph.
    """

    def __init__(self, bound: int) -> None:
        self.functions = Functions()
        self.executables: list[Executable] = []  # the latest first
        self.bound = bound
        self.captured = self.instantiated = 0  # graphs of further sizes, and how many of them had to be instantiated
        self.fitted = 0  # so many graphs in a row used executables that there were
        self.differed = 0
        self.captures_took = self.capture_takes = 0.0  # seconds of the host: for all of them, and for the latest

    def is_shared(self, state: Any, states: Iterable[Any]) -> bool:
        """True if the state's graph is to share an executable."""
        others = sum(other is not state and other.relaunch is not None for other in states)
        return self.bound > 0 and not state.alone and others >= OWN

    def waits(self, state: Any, states: Iterable[Any]) -> bool:
        """True if the state is for a size that has not yet shown that it pays to capture it: its calls took less time
        than a capture takes. The first sizes are captured anyway."""
        has_made_many = self.captured >= EAGER and self.captures_took >= SECONDS
        return has_made_many and state.spent < self.capture_takes and self.is_shared(state, states)

    def note_capture(self, seconds: float) -> None:
        self.captured += 1
        self.captures_took, self.capture_takes = self.captures_took + seconds, seconds

    def launchers(
        self, device: Any, captured: Captured, graph: CapturedGraph, proven: Proven, drawn: tuple[int, ...]
    ) -> tuple[Arrangement, list[Any]]:
        """Return an arrangement of the captured graph, and launchers that follow it: of an executable that the graph
        fits, or of a new one. Raises NoExecutable if there is none, and calls were left out of the capture."""
        shape, attributes = Shape.of(graph, captured.recording.fixed, drawn), attributes_of(graph)
        for executable in self._alike(shape, attributes):
            arrangement = arrange(proven, executable.arrangement.starts)
            # Workspaces live longer where calls were left out, so that stages may seem to pay.
            if executable.is_uncut or (captured.repeats and not executable.arrangement.stages):
                arrangement = arrangement.whole or arrangement
            if executable.fits(arrangement):
                self.executables.remove(executable)
                self.executables.insert(0, executable)
                self.fitted += 1
                templates = [stage.template for stage in arrangement.stages] or [arrangement.template]
                apart = executable.attributes != attributes
                return arrangement, [a.like(t, apart) for a, t in zip(executable.launchers, templates, strict=True)]
        if captured.repeats:
            raise NoExecutable("no executable has these nodes")
        wanted = arrange(proven)
        arrangement, launchers = device.instantiate(captured, wanted, varies=graph)
        self.instantiated += 1
        self.fitted = 0
        is_uncut = len(arrangement.stages) < len(wanted.stages)
        self.executables.insert(0, Executable(shape, attributes, arrangement, launchers, is_uncut))
        del self.executables[self.bound :]
        return arrangement, launchers

    def stream_order(self) -> tuple[int, ...]:
        """Return the numbers of the nodes of the latest executable, in the order of the stream, if a further size will
        hardly need one of its own. Otherwise return nothing."""
        if not self.executables or self.differed == DIFFERED:
            return ()
        shape = self.executables[0].shape
        if self.fitted < FITTED and not self._alike(shape, None):
            return ()
        return only_order(len(shape.kinds), shape.edges) or ()

    def note_differs(self) -> None:
        """Note that no call could be left out of a capture."""
        self.differed += 1

    def _alike(self, shape: Shape, attributes: Attributes | None) -> list[Executable]:
        """Return the executables that a graph may use; without attributes, whatever its attributes are."""
        alike = [executable for executable in self.executables if executable.shape == shape]
        if same := [executable for executable in alike if executable.attributes == attributes]:
            return same
        return alike if len(alike) >= ALIKE and alike[0].can_launch_by_node else []

    def keeps(self, shared: Any) -> bool:
        """True if the executable that is shared by this is still kept."""
        return any(kept.launchers[0].shared is shared for kept in self.executables)
