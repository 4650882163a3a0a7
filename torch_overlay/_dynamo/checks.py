"""Skips upstream's checks and helpers for stream programs that the overlay's lower layers make unnecessary.

Upstream raises an error for an event recorded after a mutation of an input, because the write-back of the mutation
comes after the graph; and for `del x` of a tensor that two streams used, it records an event and waits for the event at
once. With the overlay, the planner orders write-backs and frees by the same rule as all other operations.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._dynamo.state import handled


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


def check_input_mutation_on_current_stream(
    original: Callable[..., None], output: OutputGraph, tx: InstructionTranslatorBase
) -> None:
    if not handled(tx):
        original(output, tx)


def maybe_emit_sync_dealloc(original: Callable[..., None], tx: InstructionTranslatorBase, variable: Any) -> None:
    if not handled(tx):
        original(tx, variable)
