"""Define the lines of Inductor's wrapper that a planned region adds, and insert more of them into the finished lines,
once memory planning has decided which allocations remain: two passes.

- `share_memory` lets a call that keeps to one stream reuse memory across streams (Note [Memory of a call on one
  stream]).
- `switch_streams` switches the current stream only where a line reads it: an allocation, an extern kernel, a copy.
  Triton kernels get the raw handle of their stream. The blocks of side streams are put into ranges that profiles show
  (`profiler_ranges`, Note [Names in profiles]).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen import wrapper as upstream
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.ids import callers_device, callers_stream_index
from torch_overlay._inductor.notes import WrapperNotes


if TYPE_CHECKING:
    from torch._inductor.utils import IndentedBuffer

    from torch_overlay._inductor.streams.region_names import RegionNames


@dataclass
class StreamLine(upstream.WrapperLine):
    """A statement on streams and events, which doesn't read the current stream."""

    text: str

    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline(self.text)


class SwitchLine(StreamLine):
    """A switch of the current stream."""


@dataclass
class BeginRegion(upstream.WrapperLine):
    emitter: RegionNames

    def codegen(self, code: IndentedBuffer) -> None:
        self.emitter.write_prologue(code)


@dataclass
class EndRegion(upstream.WrapperLine):
    emitter: RegionNames

    def codegen(self, code: IndentedBuffer) -> None:
        self.emitter.write_epilogue(code)


@dataclass
class OnStream(upstream.WrapperLine):
    """A mark: the lines that follow belong to a node of this stream; None: to one that launches nothing on a device.
    `range` is the name of the work there in profiles, if it has one."""

    emitter: RegionNames
    stream: int | None
    device_index: int | None
    range: str = ""

    def codegen(self, code: IndentedBuffer) -> None:
        pass


@dataclass
class TryLine(upstream.WrapperLine):
    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline("try:")
        code.do_indent()


@dataclass
class FinallyLine(upstream.WrapperLine):
    statements: list[str]

    def codegen(self, code: IndentedBuffer) -> None:
        code.do_unindent()
        code.writeline("finally:")
        code.do_indent()
        code.writelines(self.statements)
        code.do_unindent()


@dataclass
class PlacedKernelCall(upstream.WrapperLine):
    """A kernel launch with the raw handle of its stream."""

    line: upstream.KernelCallLine
    raw_stream: str

    def codegen(self, code: IndentedBuffer) -> None:
        notes = WrapperNotes.of(self.line.wrapper)
        notes.raw_stream = self.raw_stream
        try:
            self.line.codegen(code)
        finally:
            notes.raw_stream = None


def has_streams(wrapper: Any) -> bool:
    """True if a planned region is in the lines of a wrapper."""
    return any(isinstance(line, BeginRegion) for line in wrapper.lines)


# Note [Memory of a call on one stream]
# Buffers of different streams never share memory, so a region with streams allocates more than the same region without:
# eight experts make ten allocations instead of three, a microsecond each. In a call that follows one stream (Note
# [Streams can't pay on an idle device]) a buffer may take the memory of any buffer that was freed before, whatever
# their streams. So where the plan allocates, and a fitting buffer of another stream has been freed, the code has both
# the allocation and the reuse:
#
#     if multi_stream: del buf1
#     ...
#     if multi_stream: buf3 = empty_strided_cuda((128, 1024), (1024, 1), torch.bfloat16)
#     else: buf3 = buf1; del buf1  # reuse


@dataclass
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


# Lines that neither allocate device memory nor launch on the current stream.
_INDIFFERENT = (
    upstream.CommentLine,
    upstream.EnterDeviceContextManagerLine,
    upstream.ExitDeviceContextManagerLine,
    upstream.FreeLine,
    upstream.FreeIfNotReusedLine,
    upstream.ReuseLine,
    upstream.ReinterpretLine,
    upstream.NullLine,
    upstream.KernelDefinitionLine,
    upstream.MultiOutputLine,
    upstream.SymbolicCallArgLine,
    upstream.UnbackedSymbolDefsLine,
    upstream.AssertSizeStrideLine,
    upstream.GroupedAssertSizeStrideLine,
    upstream.AssertAlignmentLine,
    upstream.LineContext,
)


def _allocates_on(line: Any) -> torch.device | None:
    """Return the device whose memory a line allocates; None if it allocates none, or the host's."""
    line = line.line if isinstance(line, IfMultiStream) else line
    device = line.node.get_device() if isinstance(line, upstream.AllocateLine) else None
    return None if device is None or device.type == "cpu" else device


def needs(line: Any, stream: int | None, emitter: RegionNames) -> int | None:
    """Return the stream that must be current when this line runs; None if it doesn't matter."""
    line = line.line if isinstance(line, IfMultiStream) else line
    if isinstance(line, upstream.AllocateLine):
        return None if _allocates_on(line) is None else emitter.plan.memory.get(line.node.get_name(), stream)
    if isinstance(line, (*_INDIFFERENT, StreamLine)):
        return None
    if isinstance(line, str) and (line.startswith(("del ", "#", "assert", "//")) or not line.strip()):
        return None
    if isinstance(line, str) and line.endswith(".reset();"):  # `del` in C++
        return None
    return stream


def share_memory(lines: list[Any]) -> list[Any]:
    """Replace lines, which have been through memory planning, so that calls that keep to one stream share memory
    between streams: Note [Memory of a call on one stream].
    """
    regions: list[RegionNames] = []
    free: dict[RegionNames, dict[tuple[Any, ...] | None, list[Any]]] = defaultdict(lambda: defaultdict(list))
    instead: dict[int, IfMultiStream] = {}
    for line in lines if inductor_config.allow_buffer_reuse else ():
        if isinstance(line, BeginRegion):
            regions.append(line.emitter)
        elif isinstance(line, EndRegion):
            regions.pop()
        elif not regions or not regions[-1].idle_streams:
            continue
        elif isinstance(line, (upstream.EnterSubgraphLine, upstream.ExitSubgraphLine)):
            free[regions[-1]].clear()
        elif isinstance(line, upstream.FreeIfNotReusedLine) and not line.is_reused and not line.comm_buffer:
            name = line.node.get_name()
            if line.node.get_inputs_that_alias_output() or name in V.graph.never_reuse_but_free_buffers:
                continue
            if name not in V.graph.get_output_names() and (key := _key(line.node)) is not None:
                free[regions[-1]][key].append(line)
        elif isinstance(line, upstream.AllocateLine) and not line.comm_buffer:
            fitting = free[regions[-1]].get(_key(line.node))
            if fitting and _fits(fitting[-1], line):
                old, multi_stream = fitting.pop(), regions[-1].multi_stream
                line.wrapper.estimate_peak.update_peak_between(old, line)
                reuse = line.wrapper.make_buffer_reuse(old.node, line.node, True)
                instead |= {
                    id(old): IfMultiStream(multi_stream, old),
                    id(line): IfMultiStream(multi_stream, line, reuse),
                }
    return [instead.get(id(line), line) for line in lines]


RANGE_CALLS = ("torch.cuda.nvtx.", "push_range(", "pop_range(")  # those that `codegen.write_range` writes
_BOUNDARIES = (EndRegion, upstream.EnterSubgraphLine, upstream.ExitSubgraphLine)


def _is_statement_apart(line: Any) -> bool:
    """True for the head of a block of Python, and for a range of the program's."""
    return isinstance(line, str) and (line.rstrip().endswith(":") or line.startswith(RANGE_CALLS))


@dataclass
class _Region:
    """The lines of a region that come next: their stream, device and range, and the streams that are current there."""

    emitter: RegionNames
    start: int  # position of the first line
    stream: int | None = None
    device: int | None = None
    range: str = ""
    is_range_open: bool = False
    current: dict[int, int] = field(default_factory=dict)  # by device; only those that were switched

    def show(self, out: list[Any], line: Any) -> None:
        """Open a range before the first line that allocates or launches in a block on a side stream; the emitter has
        marked where the block begins, with the name of the range. The range closes where work on another stream begins,
        and where a block of Python or a range of the program's begins or ends, since ranges have to nest.
        """
        moves = isinstance(line, OnStream) and line.stream != self.stream
        is_boundary = isinstance(line, _BOUNDARIES) or _is_statement_apart(line)
        if self.is_range_open and (moves or is_boundary):
            self.write_range(out, "profiler_ranges.pop()")
        if moves:
            self.range = line.range
        works = isinstance(line, upstream.KernelCallLine) or needs(line, self.stream, self.emitter) is not None
        if self.range and works and not (self.is_range_open or is_boundary or isinstance(line, OnStream)):
            self.write_range(out, f"profiler_ranges.push({self.range!r})")

    def write_range(self, out: list[Any], text: str) -> None:
        out.append(StreamLine(self.emitter.if_multi_stream(text)))
        self.is_range_open = not self.is_range_open

    def switch(self, out: list[Any], stream: int | None, is_guarded: bool) -> None:
        if stream is None:
            return
        device = callers_device(stream)
        device = self.device if device is None else device
        assert device is not None
        if self.current.get(device, callers_stream_index(device)) == stream:
            return
        self.current[device] = stream
        out.append(SwitchLine(self.emitter.switch(stream, is_guarded)))

    def restore(self, out: list[Any]) -> None:
        """Restore the caller's current streams at the region's end, also when a kernel raises."""
        if not self.current or not self.emitter.restores_streams:
            return
        streams = [self.emitter.stream(callers_stream_index(d)) for d in sorted(self.current, reverse=True)]
        tail = len(out)
        while type(out[tail - 1]) is StreamLine:  # the records and waits at the end need no current stream
            tail -= 1
        out.insert(tail, FinallyLine([self.emitter.if_multi_stream(f"restore_stream({s})") for s in streams]))
        out.insert(self.start, TryLine())


def switch_streams(lines: list[Any]) -> list[Any]:
    """Insert the switches of the current stream and the ranges, and give launches the handle of their stream."""
    out: list[Any] = []
    regions: list[_Region] = []
    guards = 0
    for line in lines:
        guards += isinstance(line, upstream.EnterDeviceContextManagerLine)
        guards -= isinstance(line, upstream.ExitDeviceContextManagerLine)
        region = regions[-1] if regions else None
        if region is not None and not isinstance(line, BeginRegion):
            region.show(out, line)
        if isinstance(line, BeginRegion):
            if region is not None:  # its caller's stream is the stream of the node that encloses it
                region.switch(out, region.stream, guards > 0)
            regions.append(_Region(line.emitter, len(out) + 1))
        elif region is None:
            pass
        elif isinstance(line, OnStream):
            region.stream, region.device = line.stream, line.device_index
            continue
        elif isinstance(line, EndRegion):
            region.restore(out)
            regions.pop()
        elif isinstance(line, upstream.KernelCallLine):
            if region.stream is not None and (line.triton or line.device.type in ("cuda", "xpu")):
                line = region.emitter.kernel_call(line, region.emitter.raw_stream(region.stream))
        else:
            if (allocated := _allocates_on(line)) is not None:  # maybe before the first operation has set a device
                region.device = allocated.index
            region.switch(out, needs(line, region.stream, region.emitter), guards > 0)
        out.append(line)
    return out
