"""Makes an executable of its own from some nodes of a captured graph, with the edges among them.

The driver clones the graph, attributes of the kernels included, and the nodes of other parts are removed from the
clone. The caller ensures that no node of a part depends on a later part. A part can't advance random generators.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.graph.conditional_nodes import nested
from torch_overlay._inductor.relaunch.graph.driver import Driver


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.graph.conditional_nodes import Setter
    from torch_overlay._inductor.relaunch.proof.nodes import Template


class Part:
    """A part of a graph. It destroys its clone and executable when it is reset or deleted, which must not happen during
    a launch, as for torch's graphs."""

    def __init__(self, owner: Any, driver: Driver) -> None:
        self.driver, self.owner = driver, owner
        self.executable = self.clone = 0

    def instantiate(self) -> None:
        """Make the executable, and destroy the previous one."""
        before, self.executable = self.executable, self.driver.instantiate(self.clone)
        if before:
            self.driver.destroy_executable(before)

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
        # At the exit of the process the driver may be unloaded already; nobody could handle the error.
        with contextlib.suppress(Exception):
            self.reset()


def part_of(
    graph: int, template: Template, owner: Any, driver: Driver | None = None, setter: Setter | None = None
) -> tuple[Part, Template]:
    """Return a part of the graph with the nodes of a template, and the template with their handles there. `setter`: if
    there are branches among them."""
    part = Part(owner, driver or Driver())
    try:
        part.clone, handle_of = part.driver.part(graph, {node.handle for node in template.nodes})
        nodes = [dataclasses.replace(node, handle=handle_of[node.handle]) for node in template.nodes]
        template = dataclasses.replace(template, nodes=tuple(nodes))
        if setter is not None:
            template = nested(part.driver, part.clone, template, setter)
        part.instantiate()
    except BaseException:
        part.reset()
        raise
    return part, template
