"""Makes the C module's `Blocks` of a proven graph: the parameters of its nodes, as the driver reads them."""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.program import LETTERS
from torch_overlay._inductor.relaunch.proof.nodes import CopyNode, EmptyNode, FillNode, KernelNode


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Node, NumberSlot, PointerSlot

KERNEL, FILL, COPY = range(3)
# A kernel's block is CUDA_KERNEL_NODE_PARAMS_v2, then the packed parameters, aligned as CUtensorMap requires.
GRID_AT, PARAMETERS_AT = 8, 128
REGION_AND_NODE = itemgetter(3, 0)  # of a pointer slot
DESTINATION, SOURCE_OF_COPY = 136, 48  # dstDevice and srcDevice in CUDA_MEMCPY3D
ON_HOST, ON_DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


def make_blocks(
    module: Any,
    exec_handle: int,
    nodes: Iterable[Node],
    slots: Iterable[PointerSlot],
    regions: int,
    numbers: Sequence[NumberSlot] = (),
    shared: Any = None,
) -> Any:
    """Return the parameter blocks of an executable graph, for the nodes, pointer slots and number slots of a template
    with so many regions. `shared`: the `Shared` of an executable that several templates use; then a launch sets every
    node that the executable holds otherwise, or launches the kernels one by one (`csrc/launch_nodes.c`).

    `patch(bases, regions=None)` takes a base for each region: an address, a tensor, or None for a region that has not
    moved. With `regions`, the bases are those of these regions, in this order, and the others have not moved. It
    returns the number of nodes set. It compares a base with that of the last call that had one for the region; if the
    driver refuses a node, the error says which, and the next call sets every node again (`stale`). Hold a lock over
    patch() and the launch, so that no other thread patches in between.

    The blocks live as long as the object, and the object must live as long as the executable is patched.
    """
    patched = sorted(slots, key=REGION_AND_NODE)
    wanted = {slot[0] for slot in (*patched, *numbers)}
    if shared is not None:
        wanted = {node.index for node in nodes if not isinstance(node, EmptyNode)}
    by_index = {node.index: node for node in nodes if node.index in wanted}
    if shared is not None and shared.launches is not None:  # the blocks are in the order of launch
        by_index = {index: by_index[index] for index, _ in shared.launches}
    position = {index: place for place, index in enumerate(by_index)}
    context = 0
    if not all(isinstance(node, KernelNode) for node in by_index.values()):
        context = module.context()
    blocks = tuple(_block(node, context) for node in by_index.values())
    held = {index: _pointers(node) for index, node in by_index.items()}
    places = []
    for index, parameter, offset, region, delta in patched:
        begin, last = held[index][parameter]
        if not 0 <= offset <= last:
            where = f"node {index} ({by_index[index].name}), parameter {parameter}"
            raise ValueError(f"{where}: no pointer slot at {offset}")
        places.append((position[index], begin + offset, region, delta))
    words = tuple(
        [(position[slot.node], _word(by_index[slot.node], slot), LETTERS.index(slot.letter)) for slot in numbers]
    )
    others = None if shared is None else (shared, tuple(by_index))
    return module.Blocks(exec_handle, blocks, tuple(places), regions, words, others)


def _word(node: Node, slot: NumberSlot) -> int:
    """Return the offset of the number slot in the node's block."""
    if slot.parameter < 0:
        return GRID_AT + 4 * (-1 - slot.parameter)
    return PARAMETERS_AT + node.parameters[slot.parameter][0]


def _block(node: Node, context: int) -> tuple[int, int, int, str, bytes, tuple[int, ...]]:
    """Return (kind, handle, context, label, block, offsets of the arguments in the block) of a node."""
    label = f"node {node.index} ({node.name})"
    if isinstance(node, KernelNode):
        size = max([offset + len(value) for offset, value in node.parameters], default=0)
        block = bytearray(PARAMETERS_AT + size)
        struct.pack_into(
            "<Q7I4x4Q", block, 0, node.func, *node.grid, *node.block, node.shared_bytes, 0, 0, node.kern, node.ctx
        )
        for offset, value in node.parameters:
            at = PARAMETERS_AT + offset
            block[at : at + len(value)] = value
        arguments = tuple([PARAMETERS_AT + offset for offset, _ in node.parameters])
        return KERNEL, node.handle, 0, label, bytes(block), arguments
    if isinstance(node, FillNode):
        fields = (node.dst, node.pitch, node.value, node.element_size, node.width, node.height)
        return FILL, node.handle, context, label, struct.pack("<QQIIQQ", *fields), ()
    if isinstance(node, CopyNode):
        source = (*_side(node.src, node.src_on_host), node.src_pitch, node.src_height)
        destination = (*_side(node.dst, node.dst_on_host), node.dst_pitch, node.dst_height)
        extent = (node.width, node.height, node.depth)
        return COPY, node.handle, context, label, struct.pack("<25Q", *source, *destination, *extent), ()
    raise TypeError(f"{label} holds no parameter that can be patched")


def _side(address: int, on_host: bool) -> tuple[int, ...]:
    """Return one side of a CUDA_MEMCPY3D up to its pitch: position in the array, kind of memory, and address."""
    return (0, 0, 0, 0, ON_HOST, address, 0, 0, 0) if on_host else (0, 0, 0, 0, ON_DEVICE, 0, address, 0, 0)


def _pointers(node: Node) -> list[tuple[int, int]]:
    """Return for each parameter its offset in the node's block, and the last offset in it at which a pointer fits."""
    if isinstance(node, KernelNode):
        return [(PARAMETERS_AT + offset, len(value) - 8) for offset, value in node.parameters]
    return [(DESTINATION, 0), (SOURCE_OF_COPY, 0)] if isinstance(node, CopyNode) else [(0, 0)]
