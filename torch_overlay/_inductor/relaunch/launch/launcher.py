"""Patches an executable graph to run on other memory, and launches it."""

from __future__ import annotations

import weakref
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.graph import read as graphs
from torch_overlay._inductor.relaunch.graph.subgraph import Part
from torch_overlay._inductor.relaunch.launch import memcpy_nodes, native


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_overlay._inductor.relaunch.proof.nodes import Template


live_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


class Launcher:
    """An executable graph with its template: `patch` points it at other memory, `replay` launches it."""

    def __init__(self, graph: torch.cuda.CUDAGraph | Part, template: Template, direct: bool = False) -> None:
        self.graph = graph
        self.template = template
        self.direct = direct  # the graph draws no random numbers, so the driver can launch it without torch
        self.patcher: memcpy_nodes.Patcher | None = None
        if memcpy_nodes.moving(template):
            self.patcher = memcpy_nodes.Patcher(graph, template, upload=upload, synchronize=torch.cuda.synchronize)
            self.exec = None  # the patcher replaces its own at each rebuild
            self.patch: Callable[..., int] = self.patcher.patch
        else:
            self.exec = native.implementation().Exec(
                graph.raw_cuda_graph_exec(), template.nodes, template.slots, template.regions, template.numbers
            )
            self.patch = self.exec.patch
        # torch.cuda.CUDAGraph.replay looks for hooks first; its base class just advances the generators and launches.
        self.replay: Callable[[], None] = (
            graph.replay if isinstance(graph, Part) else torch._C._CUDAGraph.replay.__get__(graph)
        )
        live_launchers.add(self)

    @property
    def nodes(self) -> int:
        return len(self.template.nodes)


def upload(graph: Any) -> None:
    graphs.upload(graph, torch.cuda.current_stream().cuda_stream)
