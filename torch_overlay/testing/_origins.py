"""Finds the user's lines of each line of generated code, while it is generated.

Inductor writes the names of source nodes above most kernels, and above no copy; its own map of lines leaves partitions
out. So the observed scheduler leaves a mark where it begins a node. The marks come out of the finished text again,
which is what it would be without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import Any, TYPE_CHECKING
from unittest import mock

from torch._inductor.utils import LineContext, ValueWithLineMap
from torch._inductor.virtualized import V

from torch_overlay.hooks import put_in_place
from torch_overlay.testing import _text


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

_MARK = "# user's lines of the following: "
_MARKED = re.compile(rf"\s*{_MARK}(.*)$")
_END = re.compile(r"\s*(def |class |return |finally:)")


class _Mark(LineContext):
    """Begins the lines of one node of the schedule. Passes over a wrapper's lines leave a line's context alone."""

    @property
    def text(self) -> str:
        return f"{_MARK}{self.context}"


class Origins:
    def __init__(self) -> None:
        self.scheduler: Any = None
        self.calls: set[torch.fx.Node] = set()
        self.order: dict[torch.fx.Node, int] = {}  # position in its graph

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Mark the nodes of all code that is generated inside the context."""
        from torch._inductor.codegen.cpp import KernelGroup
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.scheduler import Scheduler

        put_in_place()
        make_scheduler, call, make_wrapper = Scheduler.__init__, KernelGroup.call_kernel, PythonWrapperCodegen.__init__

        def marking_scheduler(scheduler: Any, nodes: Any) -> None:
            make_scheduler(scheduler, nodes)
            scheduler.enter_context = functools.partial(mark_node, scheduler.enter_context, scheduler)

        def mark_node(enter: Callable[..., None], scheduler: Any, node: Any) -> None:
            self.mark(V.graph.wrapper_code, [node])
            enter(node)

        def mark_host_kernel(group: Any, wrapper: Any, name: str) -> None:
            """Mark a kernel of the host, which is called when a later node has begun."""
            begun = next((line for line in reversed(wrapper.lines) if isinstance(line, _Mark)), None)
            self.mark(wrapper, group.scheduled_nodes)
            call(group, wrapper, name)
            if begun is not None:
                wrapper.lines.append(begun)

        def marking_wrapper(wrapper: Any) -> None:
            make_wrapper(wrapper)
            wrapper.run_wrapper_ir_passes = functools.partial(write_marks, wrapper.run_wrapper_ir_passes, wrapper)

        def write_marks(finish: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            wrapper.lines = [line.text if isinstance(line, _Mark) else line for line in wrapper.lines]

        with (
            mock.patch.object(Scheduler, "__init__", marking_scheduler),
            mock.patch.object(KernelGroup, "call_kernel", mark_host_kernel),
            mock.patch.object(PythonWrapperCodegen, "__init__", marking_wrapper),
        ):
            yield

    def mark(self, wrapper: Any, nodes: Iterable[Any]) -> None:
        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            return
        wrapper.lines.append(_Mark(self.lines_of(nodes)))

    def lines_of(self, nodes: Iterable[Any]) -> str:
        """Return the user's lines that nodes of a schedule come from, joined by "; "."""
        parts = [part for node in nodes for part in node.get_nodes()]
        found = self.origins(parts)
        # An operator that needs its input in memory is an origin of the kernel that computes this input, too.
        while len(found) > 1 and found[-1] in self.calls_of(V.graph.scheduler) and not parts[-1].is_extern():
            found.pop()
        return "; ".join(dict.fromkeys(line for o in found if (line := _text.line_of(o))))

    def origins(self, parts: Iterable[Any]) -> list[torch.fx.Node]:
        """Return the operators that nodes of a schedule come from, in the order of their graph."""
        found = {o for part in parts if part.node is not None for o in part.node.get_origins()}
        for graph in {o.graph for o in found if o not in self.order}:
            self.order.update({o: i for i, o in enumerate(graph.nodes)})
        return sorted((o for o in found if o.op == "call_function"), key=self.order.__getitem__)

    def calls_of(self, scheduler: Any) -> set[torch.fx.Node]:
        """Return the operators that a schedule calls: copies, and kernels of libraries."""
        if scheduler is not self.scheduler:
            parts = [part for node in scheduler.nodes for part in node.get_nodes() if part.is_extern()]
            self.scheduler, self.calls = scheduler, {found[-1] for part in parts if (found := self.origins([part]))}
        return self.calls


@dataclasses.dataclass
class Code(ValueWithLineMap):
    """Generated code without marks; `lines` has the user's lines of each of its lines, joined by "; "."""

    lines: tuple[str, ...]


def without_marks(code: ValueWithLineMap) -> Code:
    if isinstance(code, Code):  # another observer has taken them out
        return code
    kept, lines, marks, current = [], [], [], ""
    for number, row in enumerate(code.value.split("\n"), 1):
        if match := _MARKED.match(row):
            current = match[1]
            marks.append(number)
            continue
        if _END.match(row):
            current = ""
        kept.append(row)
        lines.append(current)
    line_map = [(at - sum(mark < at for mark in marks), context) for at, context in code.line_map]
    return Code("\n".join(kept), line_map, tuple(lines))


__all__ = ["Origins", "without_marks"]
