"""Reuse one stream's memory for another stream's buffers, in calls that keep to one stream.

Buffers of different streams never share memory, so a region with streams allocates more than the same region without:
eight experts make ten allocations instead of three, a microsecond each. In a call that follows one stream (Note
[Streams can't pay on an idle device]) a buffer may take the memory of any buffer that was freed before, whatever their
streams. So where the plan allocates, and a fitting buffer of another stream has been freed, the code has both the
allocation and the reuse:

    if multi_stream: del buf1
    ...
    if multi_stream: buf3 = empty_strided_cuda((128, 1024), (1024, 1), torch.bfloat16)
    else: buf3 = buf1; del buf1  # reuse
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen import wrapper as upstream
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.utils import IndentedBuffer


@dataclasses.dataclass
class IfMultiStream(upstream.WrapperLine):
    """A line of the memory plan that only a call on several streams runs; other calls run `other`."""

    multi_stream: str
    line: Any
    other: str | None = None

    def codegen(self, code: IndentedBuffer) -> None:
        written = type(code)()
        self.line.codegen(written)
        for text in written.getvalue().splitlines():
            code.writeline(f"if {self.multi_stream}: {text}")
        if self.other is not None:
            code.writeline(f"else: {self.other}")


def _key(buffer: Any) -> tuple[Any, ...] | None:
    """Return what two buffers must have in common for one to take the other's place as it is; None if none can."""
    layout = buffer.get_output_spec()
    if type(layout) not in (ir.FixedLayout, ir.FlexibleLayout) or buffer.get_device().type == "cpu":
        return None
    if V.graph.get_allocation_size(buffer) != buffer.get_size():
        return None
    *what, _stream, pool = upstream.buffer_reuse_key(buffer)
    return *what, pool, tuple(buffer.get_size()), tuple(buffer.get_stride())


def _fits(old: Any, new: Any) -> bool:
    """True by upstream's rule: keeping the old buffer until then must not raise the peak."""
    size = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(new.node), fallback=0)
    return new.should_reuse_buffer(old, size * new.node.get_dtype().itemsize)


def share_when_following(lines: Iterable[Any], multi_stream: str) -> dict[int, IfMultiStream]:
    """Return the replacements of lines of one region, by the id of the line. The lines have been through memory
    planning.
    """
    free: dict[tuple[Any, ...], list[Any]] = {}
    found: dict[int, IfMultiStream] = {}
    if not inductor_config.allow_buffer_reuse:
        return found
    for line in lines:
        if isinstance(line, (upstream.EnterSubgraphLine, upstream.ExitSubgraphLine)):
            free.clear()
        elif isinstance(line, upstream.FreeIfNotReusedLine) and not line.is_reused and not line.comm_buffer:
            name = line.node.get_name()
            if line.node.get_inputs_that_alias_output() or name in V.graph.never_reuse_but_free_buffers:
                continue
            if name not in V.graph.get_output_names() and (key := _key(line.node)) is not None:
                free.setdefault(key, []).append(line)
        elif isinstance(line, upstream.AllocateLine) and not line.comm_buffer:
            key = _key(line.node)
            if key is not None and free.get(key) and _fits(free[key][-1], line):
                old = free[key].pop()
                line.wrapper.estimate_peak.update_peak_between(old, line)
                found[id(old)] = IfMultiStream(multi_stream, old)
                found[id(line)] = IfMultiStream(
                    multi_stream, line, line.wrapper.make_buffer_reuse(old.node, line.node, True)
                )
    return found
