"""Compiles two small kernels that replace memset and memcpy nodes of a CUDA graph.

The driver launches a graph of kernels alone faster than one with other nodes among them. Triton compiles the kernels at
first use, and caches them; no Triton launcher is involved, for a graph node needs only a function handle and arguments.

Triton declares pointers to its scratch memories after a kernel's own parameters. These kernels use none, so the
pointers are null; the layout that the driver reports has to be compared with `Launch.arguments` before a handle is
used.
"""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import triton
import triton.language as tl
from triton.compiler import ASTSource

from torch_overlay._inductor.relaunch.graph.driver import KernelLaunch


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.proof.nodes import KernelNode


BLOCK = 1024
WARPS = 4
ALIGNMENT = 16
SCRATCH_POINTERS = 2  # global and profile scratch


@triton.jit
def fill_kernel(target, value, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, value.to(target.dtype.element_ty), mask=index < count)


@triton.jit
def copy_kernel(target, source, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)


def fill(target: int, value: int, element_size: int, count: int) -> KernelLaunch:
    """Return a launch that sets `count` elements of 1, 2 or 4 bytes to the low bytes of `value`."""
    total = element_size * count
    value %= 1 << 8 * element_size
    if target % 4 == 0 and total % 4 == 0:
        while element_size < 4:
            value |= value << 8 * element_size
            element_size *= 2
        count = total // 4
    function = _function("fill", element_size, target % ALIGNMENT == 0 and count % ALIGNMENT == 0, _device())
    return _launch(function, count, target.to_bytes(8, "little"), value.to_bytes(4, "little"))


def copy(target: int, source: int, size: int) -> KernelLaunch:
    """Return a launch that copies `size` bytes from `source` to `target`, which don't overlap."""
    unit = 4 if (target | source | size) % 4 == 0 else 1
    count = size // unit
    aligned = (target | source | count) % ALIGNMENT == 0
    return _launch(
        _function("copy", unit, aligned, _device()), count, target.to_bytes(8, "little"), source.to_bytes(8, "little")
    )


def prepare(device: int) -> None:
    """Compile the kernels for elements of 4 bytes. This also does Triton's work of once a process, such as starting the
    assembler twice to ask for its version."""
    for kind in ("fill", "copy"):
        for aligned in (False, True):
            _function(kind, 4, aligned, device)


def _launch(function: int, count: int, *arguments: bytes) -> KernelLaunch:
    scratch = (bytes(8),) * SCRATCH_POINTERS
    return KernelLaunch(
        func=function,
        grid=(-(-count // BLOCK), 1, 1),
        block=(32 * WARPS, 1, 1),
        shared_bytes=0,
        arguments=(*arguments, count.to_bytes(8, "little"), *scratch),
    )


def source(kind: str, element_size: int, aligned: bool) -> ASTSource:
    """Return the source for Triton. The whole signature is fixed, so Triton specialises nothing by itself."""
    element = f"*i{8 * element_size}"
    if kind == "fill":
        kernel: Any = fill_kernel
        signature = {"target": element, "value": "i32", "count": "i64", "BLOCK": "constexpr"}
        hinted = (0, 2)
    else:
        kernel = copy_kernel
        signature = {"target": element, "source": element, "count": "i64", "BLOCK": "constexpr"}
        hinted = (0, 1, 2)
    attrs = {(i,): [["tt.divisibility", ALIGNMENT]] for i in hinted} if aligned else {}
    return ASTSource(kernel, signature, constexprs={"BLOCK": BLOCK}, attrs=attrs)


OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
_alive: list[Any] = []  # a function handle is valid as long as its compiled kernel lives
LETTERS = {"fill": "wss" + "hh", "copy": "wrs" + "hh"}  # like those of `functions.parameters_of`
COUNT = 2  # number of the parameter `count`
letters: dict[int, str] = {}  # by function handle


@functools.cache
def _function(kind: str, element_size: int, aligned: bool, device: int) -> int:
    compiled: Any = triton.compile(source(kind, element_size, aligned), options=OPTIONS)
    if compiled.metadata.shared or compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise RuntimeError(f"Triton gave the {kind} kernel memory of its own: {compiled.metadata}")
    compiled._init_handles()
    _alive.append(compiled)
    letters[compiled.function] = LETTERS[kind]
    return compiled.function


def extent(node: KernelNode) -> int | None:
    """Return how many bytes each pointer of one of these kernels stands for at most; None for any other kernel."""
    return 4 * int.from_bytes(node.parameters[COUNT][1], "little") if node.func in letters else None


def _device() -> int:
    active: Any = triton.runtime.driver.active
    return active.get_current_device()
