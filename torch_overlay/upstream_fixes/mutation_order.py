"""Launch the readers of a buffer's old value before the operation that writes over it.

While an operation that mutates a buffer is lowered, the readers of the old value that are still expressions become
buffers (`mark_buffer_mutated`). Library and custom operators are put into the list of operations before that, so a
reader of this kind came after the write and read the new value, silently:

    z = x + y
    before = z + y
    custom_op_that_writes(z)
    return before * 2  # computed from the new z

Only readers of the buffer's own name become buffers. A reader of a view that a call returns (a view in a type of
another size, or of complex numbers) came after the write, too, and so did one of the base, of a write to the view:

    before = x.view(torch.int32) * 2
    x[:, 2:5] = 2
    return before + 4

That order also survives if an operation between the two is dead code. The scheduler orders a write after the readers
of the old value: the write waits for their results, in the latest version. If a kernel of the user's writes that
version, and nobody reads what it wrote, then the kernel is dropped, and the order used to be dropped with it:

    a = x.relu()
    before = operator(a)
    kernel[grid](a)  # dead
    x.copy_(y)  # was launched before the first line
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def mark_buffer_mutated(original: Callable[..., None], graph: Any, name: str) -> None:
    for shared in (name, *_others_in_memory(name, graph.operations)):
        original(graph, shared)


def _others_in_memory(name: str, operations: list[Any]) -> list[str]:
    """Return the other buffers that are in a buffer's memory because a call returned a view."""
    calls = (operation for operation in operations if isinstance(operation, (ir.FallbackKernel, ir.MultiOutput)))
    views = {call.get_name(): aliased for call in calls if (aliased := call.get_inputs_that_alias_output())}
    base = name
    while base in views:
        base = views[base][0]
    found = {base: None}
    for view, aliased in views.items():
        if not found.keys().isdisjoint(aliased):
            found[view] = None
    return [other for other in found if other != name]


def mutation_output_init(
    original: Callable[..., None], output: Any, layout: Any, mutated_node: Any, mutating_node: Any
) -> None:
    operations: list[Any] = V.graph.operations
    count = len(operations)
    original(output, layout, mutated_node, mutating_node)
    readers = operations[count:]
    position = next((i for i in reversed(range(count)) if operations[i] is mutating_node), None)
    if readers and position is not None:
        del operations[count:]
        operations[position:position] = readers


def dead_node_elimination(original: Callable[..., None], scheduler: Any) -> None:
    waits = {node: [d for d in node.read_writes.reads if isinstance(d, WeakDep)] for node in scheduler.nodes}
    original(scheduler)
    kept = set(scheduler.nodes)
    dropped = {b.get_name(): node for node in waits.keys() - kept for b in node.get_outputs()}
    if not dropped:
        return

    def earlier(name: str) -> Iterator[str]:
        """Yield the versions of a buffer before a dropped one that are still written."""
        if name not in dropped:
            yield name
            return
        buffer = scheduler.mutation_real_name.get(name, name)
        for read in dropped[name].read_writes.reads:
            if scheduler.mutation_real_name.get(read.name, read.name) == buffer:
                yield from earlier(read.name)

    for node in scheduler.nodes:
        names = {name: wait for wait in waits[node] if wait.name in dropped for name in earlier(wait.name)}
        for name, wait in sorted(names.items()):
            node.add_fake_dep(WeakDep(name, wait.mutating_buf, is_fake=True))
