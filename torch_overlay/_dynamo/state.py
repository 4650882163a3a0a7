"""Tracks which stream is current on each device while a frame is traced.

SymbolicStreamState keeps one stack of streams for all devices. Here every level of the stack (the frame, and each open
stream context) knows the current stream of each device. Only symbols change: no call of this module changes a stream or
event.

The *caller's stream* of a device is the stream that is current when the frame is entered at run time. It is current
wherever the frame has set no stream. On the device of the frame its index is 0.

Decides when to trace code that is traced in programs with streams only; in others it breaks the graph, as in stock.

This code may come before the first stream of a frame. So it is traced as if streams followed; if the graph ends without
streams, the frame is traced anew and the code left to upstream. Under `fullgraph=True`, where stock has an error, the
code is traced in any case.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from typing import Any, TYPE_CHECKING

import torch
import torch.fx.traceback as fx_traceback
from torch._dynamo import graph_break_hints, graph_bytecode_inputs as numbering
from torch._dynamo.exc import RestartAnalysis, unimplemented
from torch._dynamo.source import CurrentStreamSource
from torch._dynamo.variables.streams import (
    CudaStreamVariable,
    StreamContextVariable,
    StreamVariable,
    SymbolicStreamState,
)

from torch_overlay._dynamo import objects, registry


if TYPE_CHECKING:
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


class CallersStreamVariable(CudaStreamVariable):
    """Variable of the stream that is current on a device when the frame is entered.

    It has no source: its object is the one in the frame's table, not the stream that is current at a later look-up.
    """

    def __init__(self, *args: Any, callers_source: CurrentStreamSource, base: bool, **kwargs: Any) -> None:
        self.callers_source = callers_source
        # Comes from torch.accelerator.current_stream(), which returns a plain torch.Stream.
        self.base = base
        super().__init__(*args, **kwargs)

    def python_type(self) -> type:
        return torch.Stream if self.base else torch.cuda.Stream

    def reconstruct(self, codegen: PyCodegen) -> None:
        assert self.user_object_index is not None
        name = registry.local_of(codegen.tx.output, self.user_object_index)
        if not self.base:
            codegen.append_output(codegen.create_load(name))
            return
        codegen.add_push_null(lambda: codegen.load_import_from(objects.__name__, "as_base"))
        codegen.append_output(codegen.create_load(name))
        codegen.call_function(1, False)


@dataclasses.dataclass
class _Level:
    """Current streams of the frame, or of one open stream context."""

    streams: dict[int, StreamVariable]
    context: StreamContextVariable | None = None


class StreamState(SymbolicStreamState):
    """State of a frame, except for other accelerators than CUDA devices and for compile_on_one_rank."""

    def __init__(self) -> None:
        super().__init__()
        self.cuda = torch.accelerator.is_available()
        self.levels = [_Level({})]
        # Numbers that only the run knows -> where they come from.
        self.run_time_symbols: dict[Any, str] = {}
        # Contexts entered by calls of `__enter__` and not left; each stream context with the previous current stream.
        self.manual: list[tuple[VariableTracker, StreamVariable | None]] = []
        self.default_streams: dict[int, StreamVariable] = {}
        self._callers: dict[tuple[int, bool], CallersStreamVariable] = {}
        # The device that was current at the start of the frame; device contexts change the current one while tracing.
        self.entry_device = torch.accelerator.current_device_index() if self.cuda else -1
        if self.cuda:
            # The graph keeps this object alive through its nodes: torch.export runs the graph when this state is gone.
            callers_stream: object = objects.callers_stream(self.entry_device)
            numbering.index_to_external_object_weakref[registry.CALLERS_STREAM_INDEX] = weakref.ref(callers_stream)

    def device_index(self) -> int:
        """Return the current device at this point of the program; Dynamo executes device contexts while tracing."""
        return torch.accelerator.current_device_index()

    def current(
        self, tx: InstructionTranslatorBase, device_index: int | None = None, base: bool = False
    ) -> StreamVariable:
        """Return the current stream of a device."""
        if device_index is None:
            device_index = self.device_index()
        stream = self.levels[-1].streams.get(device_index)
        return stream if stream is not None else self.callers_stream(tx, device_index, base)

    def callers_stream(
        self, tx: InstructionTranslatorBase, device_index: int, base: bool = False
    ) -> CallersStreamVariable:
        found = self._callers.get((device_index, base))
        if found is None:
            found = self._callers[device_index, base] = self._make_callers(tx, device_index, base)
        return found

    def _make_callers(self, tx: InstructionTranslatorBase, device_index: int, base: bool) -> CallersStreamVariable:
        source = CurrentStreamSource(torch.device("cuda", device_index))
        value = objects.callers_stream(device_index)
        other = self._callers.get((device_index, not base))
        if other is not None:
            index: Any = other.user_object_index
        elif device_index == self.entry_device:
            index = registry.CALLERS_STREAM_INDEX
        else:
            index = registry.add_current(value, source)
        proxy = registry.look_up(tx, index, value)
        return CallersStreamVariable(proxy, value, index, callers_source=source, base=base)

    # The interface of SymbolicStreamState.

    def enter_stream(self, stream: StreamVariable) -> None:
        self.levels.append(_Level({**self.levels[-1].streams, stream.device.index: stream}))

    def exit_stream(self) -> None:
        self.levels.pop()

    def cur_stream(self, device: torch.device | None = None) -> StreamVariable:
        raise NotImplementedError("ask current(), which takes the translator")

    def cur_stream_id(self) -> int:
        return -1

    def set_stream(self, tx: InstructionTranslatorBase, stream: StreamVariable) -> None:
        """Trace torch.cuda.set_stream: it holds until the stream context ends, or without one beyond the frame."""
        device = stream.device
        if device.index != self.device_index():
            unimplemented(
                gb_type="set_stream with a stream of another device",
                context=f"stream of {device} while cuda:{self.device_index()} is current",
                explanation="set_stream also changes the current device, and Dynamo traces a change of the device only "
                "as a context manager.",
                hints=["Use `with torch.cuda.stream(s):` instead of set_stream.", *graph_break_hints.SUPPORTABLE],
            )
        level = self.levels[-1]
        level.streams = {**level.streams, device.index: stream}
        if level.context is not None:
            level.context.stream_now = stream  # type: ignore[attr-defined]
        else:
            assert stream.user_object_index is not None
            frame = registry.current()
            frame.set_streams.pop(device, None)
            if not isinstance(stream, CallersStreamVariable):  # it is current when the graph has returned
                frame.set_streams[device] = stream.user_object_index
            self._annotate_until_the_end(tx)
        custom = fx_traceback.current_meta.get("custom", {})
        fx_traceback.current_meta["custom"] = {**custom, "stream": stream.user_object_index}

    def _annotate_until_the_end(self, tx: InstructionTranslatorBase) -> None:
        """Annotate nodes until the frame has been traced, then restore the previous annotation."""
        if getattr(self, "_annotating", False):
            return
        self._annotating = True
        before = copy.copy(fx_traceback.current_meta.get("custom"))
        stack = contextlib.ExitStack()
        stack.enter_context(fx_traceback.preserve_node_meta())

        def restore() -> None:
            stack.close()
            if before is None:
                fx_traceback.current_meta.pop("custom", None)
            else:
                fx_traceback.current_meta["custom"] = before

        tx.output.add_cleanup_hook(restore)


def applies() -> bool:
    """True if this state can be that of the frame whose tracing begins."""
    from torch.fx.experimental.proxy_tensor import _coor_enabled

    accelerator = torch.accelerator.current_accelerator()
    return (accelerator is None or accelerator.type == "cuda") and not _coor_enabled()


def handled(tx: InstructionTranslatorBase) -> bool:
    """True if the frame that is being traced has this state."""
    return isinstance(tx.symbolic_stream_state, StreamState)


def expects_streams(tx: InstructionTranslatorBase) -> bool:
    """True if Dynamo shall trace code that upstream doesn't trace."""
    if not handled(tx) or not tx.symbolic_stream_state.cuda:
        return False
    # All attempts at a frame share one log.
    if getattr(tx.speculation_log, "found_no_streams", False):
        return False
    registry.current().expects_streams = True
    return True


def restart_without_streams(tx: InstructionTranslatorBase) -> None:
    """Trace the frame anew if it has no streams. Runs at the end of a graph, before any code is made for the graph."""
    frame = registry.current()
    if not frame.expects_streams or frame.has_streams or tx.one_graph or tx.error_on_graph_break:
        return
    tx.speculation_log.clear()
    tx.speculation_log.found_no_streams = True  # type: ignore[attr-defined]
    raise RestartAnalysis(restart_reason="the frame has no streams")
