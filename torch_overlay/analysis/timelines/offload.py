"""Name the copies of saved activations in a trace, by their offsets in the slab.

The tensors that a forward saves on the host lie in one slab, each at its own offset, in the order in which the forward
makes them; the offset identifies the tensor of a copy to the host or back. The plan's name of the tensor, and the
user's line that made it, come from the report that is published when the graphs are split (`offload.log`).

A profile has no offsets, but it has the copies of a direction in the order in which the schedule launches them. If
their sizes are those of the schedule, once or repeatedly, each copy gets the tensor at its position; otherwise none.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.offload.runtime import ALIGNMENT
from torch_overlay.analysis.race_check.trace import HOST, Launch
from torch_overlay.analysis.timelines.model import FROM_HOST, TO_HOST
from torch_overlay.testing._text import as_line, innermost_frame


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.analysis.race_check.trace import Memory, Operation
    from torch_overlay.analysis.timelines.model import Slice


def saved_tensors(operations: Sequence[Operation], reports: Sequence[Any]) -> dict[int, tuple[str, str]]:
    """Return name and user's line of the tensor that each copy moves, by the index of the copy's launch."""
    copies: dict[Memory, dict[int, int]] = {}  # slab -> copy -> its offset
    for index, operation in enumerate(operations):
        if isinstance(operation, Launch) and "copy" in operation.name and operation.stream != HOST:
            for access in operation.accesses:
                if access.view.memory.stream == HOST and access.view.span is not None:
                    copies.setdefault(access.view.memory, {})[index] = access.view.span.offset
    slabs = [_slab(report.rows) for report in reports]
    found = {}
    for memory, offsets in copies.items():
        fitting = (rows for rows, end in slabs if rows.keys() >= {*offsets.values()} and end == memory.size)
        if rows := next(fitting, None):
            found |= {index: (rows[offset].name, _line(rows[offset])) for index, offset in offsets.items()}
    return found


def offloaded(slices: Sequence[Slice], seen: Any) -> list[Slice]:
    """Return the slices of a profile, with name and line set for copies of saved activations."""
    found = list(slices)
    reports = getattr(seen, "offloads", None) or ()
    graphs = [r.copies for r in getattr(seen, "regions", ()) if getattr(r, "copies", None) is not None]
    for kind, is_backward in ((TO_HOST, False), (FROM_HOST, True)):
        schedules = [g for g in graphs if g.is_backward == is_backward]
        if len(schedules) != 1 or len(reports) != 1:
            continue
        rows = {row.name: row for row in reports[0].rows}
        order = [rows[name] for name, *_ in sorted(schedules[0].rows, key=lambda row: row[1]) if name in rows]
        copies = sorted((i for i, s in enumerate(slices) if s.kind == kind), key=lambda i: slices[i].start)
        sizes = [row.nbytes for row in order]
        if not order or [slices[i].nbytes for i in copies] != sizes * (len(copies) // len(order)):
            continue
        for position, i in enumerate(copies):
            row = order[position % len(order)]
            found[i] = replace(found[i], name=f"{kind} {row.name}", line=_line(row))
    return found


def _line(row: Any) -> str:
    return as_line(*innermost_frame(row.stack_trace))


def _slab(rows: Sequence[Any]) -> tuple[dict[int, Any], int]:
    """Return the report's rows by their offsets in the slab, and the slab's size."""
    *offsets, end = itertools.accumulate((-(-row.nbytes // ALIGNMENT) * ALIGNMENT for row in rows), initial=0)
    return dict(zip(offsets, rows)), end


__all__ = ["offloaded", "saved_tensors"]
