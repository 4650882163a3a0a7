"""Executable graphs, with the parameters of their nodes as the driver reads them (`csrc/patch.c`), which
`launch.relaunch` binds to a layout.

Note [Fields of a tensor]
By every public way, from C too, the address of a tensor takes 60 ns, which is 10 us for the 149 parameters of a model
with 16 layers: more than the rest of a relaunch. So the C module (`csrc/data_ptr.c`) reads the fields in memory: a
Python tensor holds a pointer to a TensorImpl; the TensorImpl holds a pointer to a StorageImpl, an offset, a length and
the number of a dtype, sizes and strides; the StorageImpl holds the address. Where these fields lie is fixed for a build
of torch, and promised nowhere: before the module reads anything, `teach` compares what it would read with `data_ptr()`,
sizes and strides of tensors of each dtype, views, parameters and others. If one differs, the module forgets the dtypes.
It calls `data_ptr()` for a tensor that has no storage, no elements or an unknown dtype, and for a storage that is
copied on write (`torch._lazy_clone`), whose address has to be asked for before anybody writes. It caches no field:
`p.data = x` exchanges the storage in the same TensorImpl, a storage that is resized moves, and torch.utils.swap_tensors
exchanges the TensorImpl of the same Python object.

Note [The memory that a memcpy node was made for]
A copy engine does a copy between device and host beside the kernels, so it remains the memcpy node that was captured.
(Copies within the device become kernels: `graph.read`.)
1. The driver patches a memcpy node of an executable only if the new memory is of the same kind as the node's memory
   when the executable was instantiated. A capture's addresses map one small block many times over, which no tensor's
   memory does. So before the executable is instantiated, `settle` points these nodes at any ordinary memory.
2. It refuses each copy of several rows, so there is no graph with one. If it refuses a copy all the same, the region
   runs without a graph from then on (`runner`). Most often the first launch shows it.

Note [Parts of a graph]
A part is an executable of its own, made from some nodes of a captured graph, with the edges among them (`part_of`). The
driver clones the graph, attributes of the kernels included, and the nodes of other parts are removed from the clone.
The caller ensures that no node of a part depends on a later part. A part can't advance random generators.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import struct
from operator import itemgetter
from typing import Any, NamedTuple, TYPE_CHECKING

import torch

from torch_overlay import csrc
from torch_overlay._inductor.relaunch.graph.conditional_nodes import nested
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.numbers.expressions import LETTERS
from torch_overlay._inductor.relaunch.proof.nodes import (
    CopyNode,
    FillNode,
    FIXED,
    KernelNode,
    Template,
    Unprovable,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.graph.conditional_nodes import Setter
    from torch_overlay._inductor.relaunch.proof.nodes import CopySide, Node


KERNEL, FILL, COPY = range(3)
# A kernel's block is CUDA_KERNEL_NODE_PARAMS_v2, then the packed parameters, aligned as CUtensorMap requires.
PARAMETERS_AT = 128
REGION_AND_NODE = itemgetter(3, 0)  # of a pointer slot
MEMCPY_DESTINATION, MEMCPY_SOURCE = 136, 48  # dstDevice and srcDevice in CUDA_MEMCPY3D
ON_HOST, ON_DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


def call_maker(module: Any, exec_handle: int, template: Template) -> Callable[..., Any]:
    """Return a function that makes the C module's `Call` of an executable graph (`csrc/call.c`), with a parameter block
    for each node that has a pointer slot or number slot of the template.

    A launch sets the nodes of what moved. If the driver refuses a node, the error says which, and the next launch sets
    every node again (`stale`). The blocks live as long as the `Call`.
    """
    patched = sorted(template.slots, key=REGION_AND_NODE)
    wanted = {slot[0] for slot in (*patched, *template.numbers)}
    by_index = {node.index: node for node in template.nodes if node.index in wanted}
    position = {index: place for place, index in enumerate(by_index)}
    blocks = tuple(map(_block, by_index.values()))
    held = {index: _pointers(node) for index, node in by_index.items()}
    places = []
    for index, parameter, offset, region, delta in patched:
        begin, last = held[index][parameter]
        if not 0 <= offset <= last:
            where = f"node {index} ({by_index[index].name}), parameter {parameter}"
            raise ValueError(f"{where}: no pointer slot at {offset}")
        places.append((position[index], begin + offset, region, delta))
    words = []
    for index, parameter, letter, _ in template.numbers:
        begin, _ = held[index][parameter]
        words.append((position[index], begin, LETTERS.index(letter)))
    return functools.partial(
        module.call,
        exec=exec_handle,
        nodes=blocks,
        slots=tuple(places),
        regions=template.regions,
        words=tuple(words),
    )


def _block(node: Node) -> tuple[int, int, str, bytes, tuple[int, ...]]:
    """Return (kind, handle, label, block, offsets of the arguments in the block) of a node."""
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
        return KERNEL, node.handle, label, bytes(block), arguments
    if isinstance(node, FillNode):
        fields = (node.dst, node.pitch, node.value, node.element_size, node.width, node.height)
        return FILL, node.handle, label, struct.pack("<QQIIQQ", *fields), ()
    if isinstance(node, CopyNode):
        destination, source = map(_side, node.sides)
        fields = (*source, *destination, node.width, node.height, node.depth)
        return COPY, node.handle, label, struct.pack("<25Q", *fields), ()
    raise TypeError(f"{label} holds no parameter that can be patched")


def _side(side: CopySide) -> tuple[int, ...]:
    """Return one side of a CUDA_MEMCPY3D: position in the array, kind of memory, an address of each kind, strides."""
    kind, host, device = (ON_HOST, side.address, 0) if side.on_host else (ON_DEVICE, 0, side.address)
    return 0, 0, 0, 0, kind, host, device, 0, 0, side.pitch, side.rows


def _pointers(node: Node) -> list[tuple[int, int]]:
    """Return for each parameter its offset in the node's block, and the last offset in it at which a pointer fits."""
    if isinstance(node, KernelNode):
        return [(PARAMETERS_AT + offset, len(value) - 8) for offset, value in node.parameters]
    return [(MEMCPY_DESTINATION, 0), (MEMCPY_SOURCE, 0)] if isinstance(node, CopyNode) else [(0, 0)]


log = logging.getLogger(__name__)


def teach(native: Any) -> bool:
    """Teach the C module the item size of each dtype. True if it then reads the right address of every probe; else it
    calls `data_ptr()` of each tensor."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for dtype, size in item_sizes().items():
                native.learn(torch.Tensor, torch.empty(1, dtype=dtype), size)
            native.learn(torch.Tensor, torch.nn.Parameter(torch.ones(1)), torch.ones(1).itemsize)
            with torch.enable_grad():
                found = probes()
        if native.addresses(found) != tuple([t.data_ptr() for t in found]) or not _are_read(native, found):
            raise RuntimeError("a tensor's fields lie elsewhere than the C module looks for them")
    except Exception as error:
        native.learn(torch.Tensor, None, 0)
        log.info("addresses of tensors are asked for, some 60 ns each: %s", error)
        return False
    return True


def _are_read(native: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """True if the module reads the sizes and strides of tensors, and tells apart those that differ in a bit."""
    read = [(native.fields(t), t) for t in tensors]
    negative = torch.ones(3, dtype=torch.complex64).conj().imag
    kinds = {native.fields(t)[2:] for t in (negative, torch.ones(3), torch.ones(3, dtype=torch.float64))}
    return len(kinds) == 3 and all(f is None or f[:2] == (tuple(t.size()), tuple(t.stride())) for f, t in read)


def probes() -> list[torch.Tensor]:
    """Return tensors of many kinds, in host memory: Note [Fields of a tensor]."""
    shared = torch.ones(5)
    made = [torch._lazy_clone(shared), torch._lazy_clone(shared)[1:], shared]
    for dtype in item_sizes():
        for size in ((7,), (3, 5), ()):
            whole = torch.empty(size, dtype=dtype)
            made.append(whole)
            if size:
                made += [whole[1:], whole[-1], whole[1:].detach()]
    base = torch.ones(4, 6)
    grown = torch.empty(0).resize_(11)
    made += [torch.nn.Parameter(base), torch.nn.Parameter(base[1:, 2:], requires_grad=False), base.t(), base[2:].T]
    made += [base.clone().requires_grad_().exp(), base.expand(3, 4, 6), grown, grown[3:], torch.empty(0), base[4:]]
    other = torch.nn.Parameter(torch.ones(3))
    other.data = base[1]
    return [*made, other, torch.ones(8).view(torch.int16)[5:], torch.ones(3, dtype=torch.complex64).conj().imag]


def item_sizes() -> dict[torch.dtype, int]:
    """Return dtype -> bytes of an element, for the dtypes that compiled code uses."""
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    names += " complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    return {dtype: dtype.itemsize for name in names.split() if (dtype := getattr(torch, name, None)) is not None}


TORCH_FUNCTIONS = (
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
)


@functools.cache
def implementation() -> Any:
    """Return the C module, one a process. Raise `Unprovable` if it can't be built: then there are no CUDA graphs."""
    try:
        module = csrc.extension().relaunch
    except csrc.NotBuiltError as error:
        raise Unprovable("c-module", str(error)) from None
    teach(module)
    global launching
    launching = module.launching
    return module


launching: Callable[[], bool] = bool  # True if this thread is in the middle of a launch by the C module


@functools.cache
def torch_functions() -> tuple[int, ...]:
    """Return the addresses of torch's C functions that get the current stream of a device, and allocate and free
    memory. Torch's Python functions do the same, and take a microsecond longer."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
        functions = [getattr(library, name) for name in TORCH_FUNCTIONS]
    except (OSError, AttributeError) as error:
        log.info("relaunches ask torch's Python functions for memory (%s)", error)
        return (0,) * len(TORCH_FUNCTIONS)
    return tuple([ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions])


def moving(template: Template) -> dict[CopyNode, set[int]]:
    """Return the memcpy nodes that a launch may have to patch, each with its parameters that are pointers."""
    nodes = {node.index: node for node in template.nodes if isinstance(node, CopyNode)}
    found: dict[CopyNode, set[int]] = {}
    for slot in template.slots if nodes else ():
        if slot.node in nodes and slot.region != FIXED:
            found.setdefault(nodes[slot.node], set()).add(slot.parameter)
    return found


def settle(template: Template, empty: Callable[..., torch.Tensor], driver: Driver | None = None) -> torch.Tensor | None:
    """Point the memcpy nodes of a graph at ordinary memory, before the graph is instantiated or cloned. Return that
    memory, which has to live until the graph is instantiated. `empty(size, stride, dtype)` allocates it."""
    nodes = moving(template)
    if not nodes:
        return None
    if rows := [node for node in nodes if node.height > 1 or node.depth > 1]:
        message = "it copies several rows, which the driver doesn't point at other memory"
        raise Unprovable("shape", message, node=f"{rows[0].index} ({rows[0].name})")
    driver = driver or Driver()
    # Two halves, for the two ends of a copy.
    half = -(-max(node.width for node in nodes) // 512) * 512
    memory = empty((2 * half,), (1,), torch.uint8)
    for node, parameters in nodes.items():
        driver.point_memcpy(node, {p: memory.data_ptr() + p * half for p in parameters})
    return memory


def emptied(template: Template) -> Template:
    """Return a template without its nodes and pointer slots, which the C module has copied: in Python they take several
    times the memory, for each size of a region, and the garbage collector walks them."""
    return dataclasses.replace(template, nodes=(), slots=(), conditionals=())


class Executable(NamedTuple):
    """An executable graph with its template."""

    graph: torch.cuda.CUDAGraph | Part
    template: Template
    replay: Callable[[], None]  # launches it as it is
    direct: bool  # the graph draws no random numbers, so the driver can launch it without torch


def upload(graph: Any) -> None:
    """Upload the executable to the device, which has to be done before its first node is patched: measured on an H200,
    the kernels of an executable that is patched before its upload take 0.3 us longer each, at every launch (llama with
    16 layers, 265 nodes: 880 us instead of 795).
    """
    Driver().upload(graph.raw_cuda_graph_exec(), torch.cuda.current_stream().cuda_stream)


class Part:
    """A part of a graph. It destroys its clone and executable when it is reset or deleted, which must not happen during
    a launch, as for torch's graphs."""

    def __init__(self, graph: int, wanted: set[int], owner: Any, driver: Driver) -> None:
        """`wanted`: nodes of the graph; `handles` has those of the clone by these."""
        self.driver, self.owner, self._made = driver, owner, contextlib.ExitStack()
        self.clone, self.handles = driver.part(graph, wanted)
        self._made.callback(driver.destroy_graph, self.clone)

    def instantiate(self) -> None:
        self.executable = self.driver.instantiate(self.clone)
        self._made.callback(self.driver.destroy_executable, self.executable)

    def raw_cuda_graph_exec(self) -> int:
        return self.executable

    def replay(self) -> None:
        self.driver.launch(self.executable, torch.cuda.current_stream(self.owner.device).cuda_stream)

    def reset(self) -> None:
        self._made.close()

    def __del__(self) -> None:
        # At the exit of the process the driver may be unloaded already; nobody could handle the error.
        with contextlib.suppress(Exception):
            self.reset()


def part_of(
    graph: int, template: Template, owner: Any, driver: Driver | None = None, setter: Setter | None = None
) -> tuple[Part, Template]:
    """Return a part of the graph with the nodes of a template, and the template with their handles there. `setter`: if
    there are branches among them."""
    part = Part(graph, {node.handle for node in template.nodes}, owner, driver or Driver())
    try:
        nodes = [dataclasses.replace(node, handle=part.handles[node.handle]) for node in template.nodes]
        template = dataclasses.replace(template, nodes=tuple(nodes))
        if setter is not None:
            template = nested(part.driver, part.clone, template, setter)
        part.instantiate()
    except BaseException:
        part.reset()
        raise
    return part, template
