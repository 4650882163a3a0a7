"""Insert switches of the current stream into the finished lines of a wrapper.

After memory planning has decided which allocations remain, `switch_streams` walks the lines and switches the current
stream only where a line reads it: an allocation, an extern kernel, a copy. Triton kernels get the raw handle of their
stream.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.codegen import wrapper as upstream

from torch_overlay._functorch.streams.ids import callers_device, callers_stream_index
from torch_overlay._inductor.streams.reuse import IfMultiStream, share_when_following
from torch_overlay._inductor.streams.wrapper_lines import (
    BeginRegion,
    EndRegion,
    FinallyLine,
    OnStream,
    PlacedKernelCall,
    StreamLine,
    TryLine,
)


if TYPE_CHECKING:
    from torch_overlay._inductor.streams.wrapper_lines import Emitter


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


def needs(line: Any, place: int | None, emitter: Emitter) -> int | None:
    """Return the stream that must be current when this line runs; None if it doesn't matter."""
    if isinstance(line, IfMultiStream):
        line = line.line
    if isinstance(line, upstream.AllocateLine):
        device = line.node.get_device()
        if device is None or device.type == "cpu":
            return None
        return emitter.plan.memory.get(line.node.get_name(), place)
    if isinstance(line, (*_INDIFFERENT, StreamLine)):
        return None
    if isinstance(line, str) and (line.startswith(("del ", "#", "assert")) or not line.strip()):
        return None
    return place


def _allocates_on(line: Any) -> int | None:
    if isinstance(line, IfMultiStream):
        line = line.line
    device = line.node.get_device() if isinstance(line, upstream.AllocateLine) else None
    return device.index if device is not None and device.type != "cpu" else None


def share_memory(lines: list[Any]) -> list[Any]:
    """Replace lines so that calls that keep to one stream share memory between streams: see `streams.reuse`."""
    regions: list[Emitter] = []
    inside: dict[Emitter, list[Any]] = {}
    for line in lines:
        if isinstance(line, BeginRegion):
            regions.append(line.emitter)
        elif isinstance(line, EndRegion):
            regions.pop()
        elif regions and regions[-1].idle_streams:
            inside.setdefault(regions[-1], []).append(line)
    instead: dict[int, IfMultiStream] = {}
    for emitter, own in inside.items():
        instead.update(share_when_following(own, emitter.multi_stream))
    return [instead.get(id(line), line) for line in lines]


def switch_streams(lines: list[Any]) -> list[Any]:
    """Insert the switches of the current stream, and give launches the handle of their stream."""
    out: list[Any] = []
    regions: list[dict[str, Any]] = []
    guards = 0
    for line in lines:
        if isinstance(line, upstream.EnterDeviceContextManagerLine):
            guards += 1
        elif isinstance(line, upstream.ExitDeviceContextManagerLine):
            guards -= 1
        if regions:
            regions[-1]["guards"] = guards
        if isinstance(line, BeginRegion):
            if regions:  # its caller's stream is the stream of the node that encloses it
                _switch(out, regions[-1], regions[-1]["place"])
            regions.append(
                {"emitter": line.emitter, "place": None, "current": {}, "start": None, "device": None, "guards": guards}
            )
            out.append(line)
            regions[-1]["start"] = len(out)
            continue
        if not regions:
            out.append(line)
            continue
        region = regions[-1]
        if isinstance(line, OnStream):
            region["place"], region["device"] = line.stream, line.device_index
        elif isinstance(line, EndRegion):
            _restore(out, region)
            out.append(line)
            regions.pop()
        elif isinstance(line, (upstream.EnterSubgraphLine, upstream.ExitSubgraphLine)):
            _switch(out, region, region["place"])
            out.append(line)
        elif isinstance(line, upstream.KernelCallLine):
            place = region["place"]
            if place is None or not (line.triton or line.device.type in ("cuda", "xpu")):
                out.append(line)
            else:
                out.append(PlacedKernelCall(line, region["emitter"].raw_stream(place)))
        else:
            if (device := _allocates_on(line)) is not None:  # maybe before the first operation has set a device
                region["device"] = device
            _switch(out, region, needs(line, region["place"], region["emitter"]))
            out.append(line)
    return out


def _switch(out: list[Any], region: dict[str, Any], stream: int | None) -> None:
    if stream is None:
        return
    device = callers_device(stream)
    device = region["device"] if device is None else device
    current = region["current"]
    if current.get(device, callers_stream_index(device)) == stream:
        return
    current[device] = stream
    switch = "set_stream" if region["guards"] else "restore_stream"  # without a guard the device must stay as it is
    emitter = region["emitter"]
    out.append(StreamLine(emitter.if_multi_stream(f"{switch}({emitter.stream(stream)})")))


def _restore(out: list[Any], region: dict[str, Any]) -> None:
    """Restore the caller's current streams at the region's end, also when a kernel raises."""
    if not region["current"]:
        return
    emitter = region["emitter"]
    devices = sorted(region["current"], reverse=True)
    streams = [emitter.stream(callers_stream_index(device)) for device in devices]
    statements = [emitter.if_multi_stream(f"restore_stream({stream})") for stream in streams]
    # The records and waits at the region's end need no current stream: they stand after the block.
    tail = len(out)
    while (
        isinstance(out[tail - 1], StreamLine)
        and "set_stream" not in out[tail - 1].text
        and "restore_stream" not in out[tail - 1].text
    ):
        tail -= 1
    out.insert(tail, FinallyLine(statements))
    out.insert(region["start"], TryLine())
