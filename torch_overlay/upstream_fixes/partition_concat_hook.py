"""Has the scheduler hand concatenations on from graph partition to graph partition (partition_concat.py)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay.upstream_fixes.partition_concat import hand_on_concatenations


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def get_graph_partition_signature(
    original: Callable[..., list[Any]], scheduler: Any, partitions: Sequence[Any], skip_cudagraphs: list[bool]
) -> list[Any]:
    signatures = original(scheduler, partitions, skip_cudagraphs)
    hand_on_concatenations(scheduler, partitions, signatures)
    return signatures


__all__ = ["get_graph_partition_signature"]
