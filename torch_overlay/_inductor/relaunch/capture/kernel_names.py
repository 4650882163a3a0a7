"""Names each kernel of a graph by the user's line and module, in the annotations that torch's profiler reads.

    profiler.export_chrome_trace(path, cuda_graph_annotations=torch.cuda.graph_annotations.get_kernel_annotations())

torch finds the annotation of a kernel by the id that the driver gives to the node of an executable: that of the
executable's graph, and the node's own, which a node keeps when its graph is cloned or instantiated. A driver older than
that of CUDA 13.1 tells no such ids. There `are_available` is False, nothing is noted, and profiles have the ranges of
`profiler_ranges` alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import weakref
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.kernel_places import place_at


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from torch_overlay._inductor.relaunch.launch.executable import Executable

log = logging.getLogger(__name__)


def are_available() -> bool:
    return torch.cuda.graph_annotations.is_available()


class KernelLines:
    """Notes which line of the generated module with these globals makes each node of a capture, by tracing it."""

    def __init__(self, namespace: Mapping[str, Any], nodes: Callable[[], Sequence[int]]) -> None:
        """`nodes()` returns the handles of the nodes that the graph has so far."""
        self.namespace, self.nodes = namespace, nodes
        self.made: dict[int, tuple[str, int]] = {}  # handle -> file and line of generated code
        self.known: set[int] = set()
        self.at: tuple[str, int] | None = None

    def __enter__(self) -> KernelLines:
        self.before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self.before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._passed if frame.f_globals is self.namespace else None

    def _passed(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A line begins, or a function of the module returns."""
        with contextlib.suppress(RuntimeError):  # the capture is broken, and the region is about to say so
            new = set(self.nodes()) - self.known
            self.known |= new
            if self.at is not None:
                self.made |= dict.fromkeys(new, self.at)
        self.at = frame.f_code.co_filename, frame.f_lineno
        return self._passed

    def places(self) -> dict[int, str]:
        """Return the user's line and module by the handle of a node, where they are known."""
        return {node: place for node, at in self.made.items() if (place := place_at(*at))}


def annotate(places: Mapping[int, str], captured: Sequence[int], executable: Executable) -> None:
    """Annotate the kernels of an executable, until that is freed. `places`: of the user's program, by the handle of a
    node in the capture; `captured`: the handles there of the executable's nodes.
    """
    from torch.cuda._graph_annotations import record_node_annotation, remove_kernel_annotations
    from torch.cuda._utils import _check_cuda_bindings as outputs

    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
        graph = outputs(runtime.cudaGraphExecGetId(executable.graph.raw_cuda_graph_exec()))
        for handle, node in zip(captured, executable.template.nodes, strict=True):
            if place := places.get(handle):
                number = outputs(runtime.cudaGraphNodeGetToolsId(node.handle)) & 0xFFFFFFFF
                record_node_annotation(graph << 32 | number, {"name": place})
    except RuntimeError as error:  # a graph without names is a graph
        log.info("a graph is not annotated: %s", error)
    else:
        weakref.finalize(executable.graph, remove_kernel_annotations, [graph])
