"""A part of a captured graph as an executable of its own: some of its nodes, with the edges among them.

The driver clones the graph, attributes of the kernels included, and what belongs to other parts is taken out of the
clone. Whoever makes parts sees to it that no node of a part depends on a later part. A part doesn't know of random
generators.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.graph.driver import Driver


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay._inductor.relaunch.proof.nodes import Template


class Part:
    """`nodes` are handles in the graph. It destroys what it made; not while it is launched, as torch's graphs."""

    def __init__(self, graph: int, nodes: Iterable[int], owner: Any, driver: Driver | None = None) -> None:
        self.driver, self.owner = driver or Driver(), owner
        self.executable = self.clone = 0
        self.clone, self.handle_of = self.driver.part(graph, set(nodes))
        try:
            self.instantiate()
        except BaseException:
            self.reset()
            raise

    def instantiate(self) -> None:
        """Makes the executable; the one that there was goes."""
        before, self.executable = self.executable, self.driver.instantiate(self.clone)
        if before:
            self.driver.destroy_executable(before)

    def renamed(self, template: Template) -> Template:
        """The template with the handles that the nodes have here."""
        nodes = [dataclasses.replace(node, handle=self.handle_of[node.handle]) for node in template.nodes]
        return dataclasses.replace(template, nodes=tuple(nodes))

    def raw_cuda_graph_exec(self) -> int:
        return self.executable

    def replay(self) -> None:
        self.driver.launch(self.executable, torch.cuda.current_stream(self.owner.device).cuda_stream)

    def reset(self) -> None:
        executable, self.executable = self.executable, 0
        clone, self.clone = self.clone, 0
        if executable:
            self.driver.destroy_executable(executable)
        if clone:
            self.driver.destroy_graph(clone)

    def __del__(self) -> None:
        # At the exit of the process the driver may be gone already; there is nobody to tell.
        with contextlib.suppress(Exception):
            self.reset()
