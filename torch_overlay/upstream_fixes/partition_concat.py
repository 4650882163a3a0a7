"""Give a concatenation whose inputs are computed in several graph partitions one allocation.

Inductor computes the inputs of a concatenation in place, as parts of its result, and allocates the result with the
first of them. A partition passes the parts that it computed to the next one, not the whole, so that the next one
allocated another result: the parts that an earlier partition had computed were silently missing from it.

    first = x @ y
    second = (x + 1).cpu().cuda() @ y  # splits the graph in two
    return torch.cat([first, second])  # its first half was never written
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def hand_on_concatenations(scheduler: Any, partitions: Sequence[Any], signatures: Sequence[Any]) -> None:
    """Change the signatures of partitions so that each concatenation is allocated in the first partition that computes
    a part of it, and passed on to the others.
    """
    made: dict[str, dict[str, int]] = defaultdict(dict)  # a result -> its parts and itself -> the partition of each
    for number, partition in enumerate(partitions):
        for whole, part in _concatenated(scheduler, partition):
            made[whole][part] = number
    for whole, parts in made.items():
        numbers = sorted(set(parts.values()))
        if len(numbers) > 1:
            _hand_on(scheduler.name_to_buf[whole], numbers, partitions, signatures)
            for part in parts.keys() - {whole}:
                _drop(part, scheduler.mutation_real_name, partitions, signatures)


def _concatenated(scheduler: Any, partition: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield the parts of concatenations that a partition computes: names of the whole and of the part, or the whole
    again.
    """
    for node in partition:
        for output in node.get_outputs():
            name = whole = output.get_name()
            while isinstance(layout := scheduler.name_to_buf[whole].node.layout, ir.NonOwningLayout):
                whole = layout.view.get_name()
                if whole not in scheduler.name_to_buf:
                    break
            else:
                if isinstance(scheduler.name_to_buf[whole].node, ir.ConcatKernel):
                    yield whole, name


def _hand_on(whole: Any, numbers: Sequence[int], partitions: Sequence[Any], signatures: Sequence[Any]) -> None:
    """Pass the concatenation's buffer on from the first partition that computes a part to the last one, which holds the
    concatenation itself.
    """
    name = whole.get_name()
    for number in numbers:
        signature = signatures[number]
        if number != numbers[-1] and all(node.get_name() != name for node in signature.output_nodes):
            signature.output_nodes.append(whole.node)
        if number != numbers[0]:
            signature.input_nodes[name] = whole.node
            signature.input_deallocation[name] = any(name in node.last_usage for node in partitions[number])


def _drop(part: str, real: Mapping[str, str], partitions: Sequence[Any], signatures: Sequence[Any]) -> None:
    """Remove a part that only its concatenation reads from the partitions' arguments: it would be the same memory
    twice. `real` maps the name that an update in place gives to a part's new value to the part's own.
    """
    if part in V.graph.get_output_names():
        return
    for partition, signature in zip(reversed(partitions), reversed(signatures)):
        signature.output_nodes[:] = [n for n in signature.output_nodes if n.get_name() != part]
        if any(part in node.get_buffer_names() for node in partition):
            return
        readers = [node for node in partition if not isinstance(node.node, ir.ConcatKernel)]
        if any(part in (name, real.get(name)) for node in readers for name in node.used_buffer_names()):
            return
        if part in signature.input_nodes:
            del signature.input_nodes[part], signature.input_deallocation[part]
        for node in partition:  # the part isn't there to be freed either
            node.last_usage.discard(part)


def get_graph_partition_signature(
    original: Callable[..., list[Any]], scheduler: Any, partitions: Sequence[Any], skip_cudagraphs: list[bool]
) -> list[Any]:
    signatures = original(scheduler, partitions, skip_cudagraphs)
    hand_on_concatenations(scheduler, partitions, signatures)
    return signatures
