"""Find the operations that the elements of a view come from, where only a part of its memory was updated.

`v = x + y; v[:, ::2].add_(z)` is, after functionalization, a new value: `slice_scatter(v, ...)`. A column that the
update left alone is in eager what it was, and whoever had waited for `x + y` may read it; the same must hold of that
column in the new value. Views are followed where they select along dimensions; any other view counts as all of
its base.
"""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._functorch.streams.fx import is_view


if TYPE_CHECKING:
    from torch.fx import Node

_aten = torch.ops.aten
Box: TypeAlias = "tuple[range, ...]"  # elements of a value: the indices along each dimension


def sources(node: Node, box: Box | None = None) -> set[Node]:
    """Return the operations that computed the elements of a value that are in the box, or inputs; too many rather than
    too few.
    """
    if box is None and (box := _whole(node)) is None:
        return {node}
    args: Any = node.args
    target = node.target
    if target in (_aten.slice_scatter.default, _aten.select_scatter.default):
        base, update = args[0], args[1]
        if (found := _selected(node, base, 2)) is None:
            return sources(base) | sources(update)
        dim, taken = found
        if not _meet(box[dim], taken):
            return sources(base, box)
        inside = (range(len(taken)),) if target is _aten.slice_scatter.default else ()
        made = sources(update, (*box[:dim], *inside, *box[dim + 1 :]))
        return made if _contains(taken, box[dim]) else made | sources(base, box)
    if target in (_aten.slice.Tensor, _aten.select.int):
        if (found := _selected(node, args[0], 1)) is None:
            return sources(args[0])
        dim, taken = found
        kept = 1 if target is _aten.slice.Tensor else 0
        indices = taken[box[dim].start : box[dim].stop : box[dim].step] if kept else taken
        return sources(args[0], (*box[:dim], indices, *box[dim + kept :]))
    if target in (_aten.alias.default, _aten.detach.default):
        return sources(args[0], box)
    if target in (_aten.permute.default, _aten.transpose.int, _aten.t.default):
        order = _order(node, len(box))
        return sources(args[0], tuple(box[order.index(d)] for d in range(len(box))))
    if is_view(node) and isinstance(args[0], torch.fx.Node):
        return sources(args[0], _box_before_split(node, args[0], box) if target is _aten.view.default else None)
    return {node}


def _whole(node: Node) -> Box | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(map(range, value.shape))


def _selected(node: Node, base: Node, first: int) -> tuple[int, range] | None:
    """Return the dimension of the base along which a node selects, by the node's arguments from the index `first` on,
    and the selected indices; None if that isn't known.
    """
    if (whole := _whole(base)) is None or not whole or node.kwargs:
        return None
    arguments: Any = (*node.args[first:], *(0,) * (len(node.args) == first))
    dim, *where = arguments
    if not isinstance(dim, int) or not all(n is None or isinstance(n, int) for n in where):
        return None
    size = whole[dim]
    if node.target in (_aten.select.int, _aten.select_scatter.default):
        (index,) = where
        return dim % len(whole), size[index : index + 1 or None]
    start, stop, step = (*where, *(None,) * (3 - len(where)))
    return dim % len(whole), size[slice(start, stop, step)]


def _box_before_split(node: Node, base: Node, box: Box) -> Box | None:
    """Return the box in the base of a view that only splits one dimension in two, as `unflatten` does; None for other
    views.
    """
    made, given = _whole(node), _whole(base)
    if made is None or given is None or len(made) != len(given) + 1:
        return None
    dim = next((d for d, (a, b) in enumerate(zip(made, given)) if a != b), len(given) - 1)
    if made[dim + 2 :] != given[dim + 1 :]:
        return None
    outer, inner, size = box[dim], box[dim + 1], len(made[dim + 1])
    if len(outer) == 1:
        taken = range(outer[0] * size + inner.start, outer[0] * size + inner.stop, inner.step)
    elif inner == made[dim + 1] and outer.step == 1 and outer:
        taken = range(outer[0] * size, (outer[-1] + 1) * size)
    else:
        taken = given[dim]
    return (*box[:dim], taken, *box[dim + 2 :])


def _order(node: Node, dims: int) -> list[int]:
    """Return, for each dimension of a permutation, the dimension of its base that it is."""
    args: Any = node.args
    order = list(range(dims))
    if node.target is _aten.permute.default:
        return [d % dims for d in args[1]]
    one, other = (args[1], args[2]) if node.target is _aten.transpose.int else (0, 1)
    if dims > 1:
        order[one], order[other] = order[other], order[one]
    return order


def _meet(a: range, b: range) -> bool:
    """True if the ranges have an index in common. The common indices are equally spaced."""
    if not a or not b:
        return False
    first = max(0, -(-(b[0] - a[0]) // a.step))
    return any(i in b for i in a[first : first + b.step // math.gcd(a.step, b.step)])


def _contains(whole: range, part: range) -> bool:
    return not part or (part[0] in whole and part[-1] in whole and (len(part) == 1 or not part.step % whole.step))
