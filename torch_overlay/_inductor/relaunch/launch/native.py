"""The parts of a relaunch that talk to the driver: aliased memory for captures, and the patching of executables.

*Memory.* A capture runs no kernel, so the memory it "uses" may be any. A range is address space in which every piece
maps the same small physical block, however many GiB the region asks for. `overlay_alloc` and `overlay_free` are the
two functions of a pluggable allocator: torch calls them from any thread, with or without the interpreter's lock, so
they touch no Python object and take one lock of their own. `use(range)` says which range a thread's allocations come
from; a thread that never said so shares the range of its device that is in use, if there is exactly one.

*Patching.* `Exec(exec_handle, nodes, words, regions)` takes the nodes and words of a template, and owns one parameter
block for each node that holds a pointer. `patch(bases)` writes the words of the regions whose base changed, and hands
the blocks of the nodes that own them to the driver. It allocates nothing, and beyond one comparison a region its cost
grows with what moved alone.

*Calling.* `call(...)` of an Exec's blocks is a whole relaunch in one call: `native_call`.

It is C (`torch_overlay/csrc`). The tests have a model of it in Python, which behaves the same.

Note [Addresses of captures]
1. Within a range no address is handed out twice, so one address stands for one allocation.
2. Unused addresses lie before, between and after the allocations, inside the range's bounds: a word that points a
   little outside of its allocation is found in the range and in no allocation, and can be refused.
3. Ranges with a different `gap` keep their allocations at different distances. Whatever holds one region's address
   plus a constant, and by chance points into another region, differs between two such captures.
4. `release` unmaps; the addresses go back to the driver when torch has freed every segment that lay in their arena (it
   keeps the segments of a pool as long as a captured graph retains the pool). Until then the driver gives them to
   nobody, so torch's books never hold an address twice.
5. All addresses are above 4 GiB, so the upper half of a pointer is not zero: a word that looks like the lower half of
   one is none (`proof.prove`, Note [What a word can hide]).
6. Of two 32-bit numbers in a row the second one could pass for the upper half of an address. Left alone, the driver
   begins at 1 TiB, where that half is 256, which many kernels are given as a size; so it is asked for a place where it
   is 705 or more, for 704 begins the descriptors of tensors that matrix products take. It may refuse: a number that
   passes for an address does no harm but that of a capture refused, and the next one is made at other addresses.

Note [Remains on the stack]
A launcher hands over what its structures' unused fields hold: what lay on the stack. Two captures of a region leave the
same there, but for one thing, which our own allocator does: blocks of 12 MiB are mapped when a range is full, which is
at another allocation where the gaps are wider, and the driver's functions leave the addresses of the blocks, which are
in the range and stand for different bytes in each capture. So the stack below an allocation is cleared, as it is when a
capture begins.

A range is mapped as it fills, a physical block of 12 MiB at a time, for the driver maps whole blocks alone. A block
takes the host as long whatever its size (on a machine with an H200 36 us to map it and grant access, 22 us to unmap it,
and no less a block if it is done for many at once), and a capture is to take no more than 16 MiB of the device.
Allocations lie 64 KiB times the gap apart, and are aligned as the caching allocator aligns.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import csrc
from torch_overlay._inductor.relaunch.launch import data_ptrs
from torch_overlay._inductor.relaunch.proof.nodes import CopyNode, FillNode, KernelNode, Refusal


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay._inductor.relaunch.proof.nodes import Node, Word

log = logging.getLogger(__name__)

TORCH_FUNCTIONS = (
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
)


def complete(module: Any) -> Any:
    """`relaunch` of the extension module, with `Exec` in it."""
    data_ptrs.teach(module)
    return with_exec(module)


def with_exec(module: Any) -> Any:
    module.Exec = functools.partial(_make_exec, module)
    return module


@functools.cache
def implementation() -> Any:
    """The C module, one a process. Without one there are no graphs: raises `Refusal`."""
    try:
        return complete(csrc.extension().relaunch)
    except csrc.NotBuiltError as error:
        raise Refusal("c-module", str(error)) from None


def _built() -> Any:
    """The C module if somebody has asked for it, and it could be built; else None."""
    return implementation() if implementation.cache_info().currsize else None


@functools.cache
def torch_functions() -> tuple[int, ...]:
    """Addresses of functions that torch has for C: the current stream of a device, memory of its allocator, and the end
    of that. Its Python functions do the same, and take a microsecond longer."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
        functions = [getattr(library, name) for name in TORCH_FUNCTIONS]
    except (OSError, AttributeError) as error:
        log.info("relaunches ask torch's Python functions for memory (%s)", error)
        return (0,) * len(TORCH_FUNCTIONS)
    return tuple([ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions])


def cached() -> int:
    """Bytes of scratch memory that stay between launches: Note [Scratch cache] of `native_call`."""
    module = _built()
    return module.cached() if module is not None else 0


def free_cached() -> None:
    """Frees that memory: what launches are using, as soon as they have."""
    module = _built()
    if module is not None:
        module.free_cached()


def launching() -> bool:
    """Is this thread in the middle of a launch by the C module?"""
    module = _built()
    return module is not None and module.launching()


KERNEL, FILL, COPY = range(3)
# A kernel's block is CUDA_KERNEL_NODE_PARAMS_v2, then the packed parameters, aligned as CUtensorMap wants it.
PARAMETERS_AT = 128
DESTINATION, SOURCE_OF_COPY = 136, 48  # dstDevice and srcDevice in CUDA_MEMCPY3D
ON_HOST, ON_DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


def _make_exec(module: Any, exec_handle: int, nodes: Iterable[Node], words: Iterable[Word], regions: int) -> Any:
    """The parameter blocks of an executable graph, for the nodes and words of a template with so many regions.

    `patch(bases, regions=None)` takes a base for each region: an address, a tensor, or None for a region that stays
    where it is. With `regions`, the bases are those of these regions, in this order, and all others stay. It returns
    the number of nodes set. What a base was is known from the last call that gave it; if the driver refuses a node,
    the error says which, and the next call sets every node anew (`stale`). Two threads must not come between each
    other's patch() and launch: hold a lock.

    The blocks live as long as the object, and the object must live as long as the executable is patched.
    """
    patched = sorted(words, key=lambda word: (word.region, word.node))
    wanted = {word.node for word in patched}
    by_index = {node.index: node for node in nodes if node.index in wanted}
    position = {index: place for place, index in enumerate(by_index)}
    context = 0
    if not all(isinstance(node, KernelNode) for node in by_index.values()):
        context = module.context()
    blocks = tuple(_block(node, context) for node in by_index.values())
    places = tuple(
        [(position[word.node], _place(by_index[word.node], word), word.region, word.delta) for word in patched]
    )
    return module.Blocks(exec_handle, blocks, places, regions)


def _block(node: Node, context: int) -> tuple[int, int, int, str, bytes, tuple[int, ...]]:
    """(kind, handle, context, label, block, offsets of the arguments in the block) of a node."""
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
    """One side of a CUDA_MEMCPY3D up to its pitch: where in the array, the kind of memory, and the address."""
    return (0, 0, 0, 0, ON_HOST, address, 0, 0, 0) if on_host else (0, 0, 0, 0, ON_DEVICE, 0, address, 0, 0)


def _place(node: Node, word: Word) -> int:
    """Where in the node's block the word lies."""
    offset, value = node.parameters[word.parameter]
    if not 0 <= word.offset <= len(value) - 8:
        raise ValueError(f"node {node.index} ({node.name}), parameter {word.parameter}: no word at {word.offset}")
    if isinstance(node, KernelNode):
        return PARAMETERS_AT + offset + word.offset
    if isinstance(node, CopyNode):
        return SOURCE_OF_COPY if word.parameter else DESTINATION
    return 0
