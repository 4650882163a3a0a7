"""Decides when to trace code that is traced in programs with streams only; in others it breaks the graph, as in stock.

This code may come before the first stream of a frame. So it is traced as if streams followed; if the graph ends without
streams, the frame is traced anew and the code left to upstream. Under `fullgraph=True`, where stock has an error, the
code is traced in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._dynamo.exc import RestartAnalysis

from torch_overlay._dynamo import registry
from torch_overlay._dynamo.state import handled


if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


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
