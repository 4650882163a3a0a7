"""Patches an executable graph to run on other memory, and launches it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.graph.native_read import NativeDriver
from torch_overlay._inductor.relaunch.graph.subgraph import Part
from torch_overlay._inductor.relaunch.launch import memcpy_nodes, native


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Template


live_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


def emptied(template: Template) -> Template:
    """Return a template without its nodes and pointer slots."""
    return dataclasses.replace(template, nodes=(), slots=())


class Launcher:
    """An executable graph with its template: `patch` points it at other memory, `replay` launches it. With `shared`,
    other launchers have the same executable, each with a template of its own."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph | Part, template: Template, direct: bool = False, shared: Any = None
    ) -> None:
        self.graph = graph
        self.shared = shared
        self.template, self.nodes = template, len(template.nodes)
        self.handles = {} if shared is None else {node.index: node.handle for node in template.nodes}
        self.direct = direct  # the graph draws no random numbers, so the driver can launch it without torch
        self.patcher: memcpy_nodes.Patcher | None = None
        if memcpy_nodes.moving(template):
            self.patcher = memcpy_nodes.Patcher(graph, template, upload=upload, synchronize=torch.cuda.synchronize)
            self.exec = None  # the patcher replaces its own at each rebuild
            self.patch: Callable[..., int] = self.patcher.patch
        else:
            parts = template.nodes, template.slots, template.regions, template.numbers, shared
            self.exec = native.implementation().Exec(graph.raw_cuda_graph_exec(), *parts)
            self.patch = self.exec.patch
        # torch.cuda.CUDAGraph.replay looks for hooks first; its base class just advances the generators and launches.
        self.replay: Callable[[], None] = (
            graph.replay if isinstance(graph, Part) else torch._C._CUDAGraph.replay.__get__(graph)
        )
        live_launchers.add(self)

    def like(self, template: Template) -> Launcher:
        """Return a launcher of the same executable with another template, whose nodes are those of this one's with
        other parameters."""
        nodes = tuple([dataclasses.replace(node, handle=self.handles[node.index]) for node in template.nodes])
        return Launcher(self.graph, dataclasses.replace(template, nodes=nodes), self.direct, self.shared)

    def forget(self) -> None:
        """Drop the nodes and the pointer slots, which the C module has copied: in Python they take several times the
        memory, for each size of a region, and the garbage collector walks them."""
        if self.patcher is None:
            self.template = emptied(self.template)


class ByNode:
    """A launcher without an executable: it launches the kernels of a template one by one, in an `order`."""

    shared = patcher = None
    direct = True

    def __init__(self, template: Template, order: Sequence[int]) -> None:
        self.template, self.nodes = template, len(template.nodes)
        shared = native.apart(template, order)
        parts = template.nodes, template.slots, template.regions, template.numbers, shared
        self.exec = native.implementation().Exec(0, *parts)
        self.patch: Callable[..., int] = self.exec.patch

    def replay(self) -> None:
        raise RuntimeError("there is no executable")

    def forget(self) -> None:
        """Drop the nodes and the pointer slots, as `Launcher.forget`."""
        self.template = emptied(self.template)


def upload(graph: Any) -> None:
    """Upload the executable to the device, which has to be done before its first node is patched: measured on an H200,
    the kernels of an executable that is patched before its upload take 0.3 us longer each, at every launch (llama with
    16 layers, 265 nodes: 880 us instead of 795).
    """
    NativeDriver().upload(graph.raw_cuda_graph_exec(), torch.cuda.current_stream().cuda_stream)
