"""What reads a buffer's old value is launched before the operation that writes over it.

While an operation that mutates a buffer is lowered, the readers of the old value that are still expressions become
buffers (`mark_buffer_mutated`). Library and custom operators are put into the list of operations before that, so such a
reader came behind the write and read the new value, silently:

    z = x + y
    before = z + y
    custom_op_that_writes(z)
    return before * 2  # of the z that was written
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable


def mutation_output_init(
    original: Callable[..., None], output: Any, layout: Any, mutated_node: Any, mutating_node: Any
) -> None:
    operations: list[Any] = V.graph.operations
    count = len(operations)
    original(output, layout, mutated_node, mutating_node)
    readers = operations[count:]
    place = next((i for i in reversed(range(count)) if operations[i] is mutating_node), None)
    if readers and place is not None:
        del operations[count:]
        operations[place:place] = readers


__all__ = ["mutation_output_init"]
