"""Keeps copies of host tensors on the device, for compiled code that was rewritten to take them there.

A copy goes through pinned memory and doesn't block the host. The caching host allocator reuses pinned memory when the
copy from it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses import FakeTensor

from torch_overlay import config
from torch_overlay._functorch.streams.ids import index_now
from torch_overlay._inductor.relaunch.notes import CompiledNotes
from torch_overlay._inductor.relaunch.rewrites.graph import current, LARGEST, rewrite


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import GraphModule

    from torch_overlay._inductor.relaunch.rewrites.graph import Resident


MOST_CHANGES = 8  # calls in a row with other bytes; then they are not compared for a while
PAUSE = 256  # calls
STREAMS = 4  # whose copies are kept, for one input

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Residents:
    """The inputs of one compiled graph that are kept. Each stream has copies of its own, so that no stream frees or
    replaces what another one reads."""

    def __init__(self, rows: Sequence[Resident]) -> None:
        self.rows = tuple(rows)
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by position and stream
        self.changes: Counter[int] = Counter()  # in a row, by position
        self.captured: list[torch.Tensor] = []
        self.copies = 0

    def around(self, model: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a function that calls compiled code with the kept copies of its inputs."""
        rows, on_device = self.rows, self.on_device
        returned = [(row.position, output) for row in rows for output in row.outputs]

        def run(inputs: list[Any]) -> Any:
            given = [(output, inputs[position]) for position, output in returned]
            for position, device, _ in rows:
                inputs[position] = on_device(position, index_now(device), inputs[position])
            results = model(inputs)
            if not given:
                return results
            results = list(results)
            for output, tensor in given:
                results[output] = tensor
            return tuple(results)

        return run

    def on_device(self, position: int, device: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor on the device, of the same shape and strides."""
        stream = _stream(device)
        size = tensor.nbytes
        if isinstance(tensor, FakeTensor) or _is_capturing() or tensor.is_pinned():
            self.copies += 1
            return self._not_kept(tensor, device)
        kept = self.kept.get((position, stream))
        if kept is not None and self.changes[position] < MOST_CHANGES and _same(kept[0], tensor, size):
            self.changes[position] = 0
            return kept[1]
        self.copies += 1
        if size > LARGEST or tensor.is_neg() or not is_non_overlapping_and_dense_or_false(tensor):
            return _plain_copy(tensor, device)
        pinned = _pinned(tensor)
        copy = _copied(pinned, device)
        changes = self.changes[position] + (kept is not None)
        self.changes[position] = changes if changes < MOST_CHANGES + PAUSE else 0
        if len(self.kept) >= STREAMS * len(self.rows):
            self.kept.clear()
        self.kept[position, stream] = pinned, copy
        return copy

    def _not_kept(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Copy what is in pinned memory, where the device may be writing to it, so that the copy has its turn on the
        stream; or any tensor in a capture of the caller's, where Inductor has a scalar copied from pinned memory."""
        if tensor.dim() or not _is_capturing():
            return _plain_copy(tensor, device)
        self.captured.append(pinned := _pinned(tensor))  # the caller's graph reads it
        return _copied(pinned, device)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _is_capturing() -> bool:
    return torch._C._cuda_isCurrentStreamCapturing()


def _like(tensor: torch.Tensor, **where: Any) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, **where)


def _plain_copy(tensor: torch.Tensor, device: int) -> torch.Tensor:
    return _like(tensor, device=torch.device("cuda", device)).copy_(tensor)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return _like(tensor, pin_memory=True).copy_(tensor)


def _copied(pinned: torch.Tensor, device: int) -> torch.Tensor:
    return _like(pinned, device=torch.device("cuda", device)).copy_(pinned, non_blocking=True)


def _same(kept: torch.Tensor, tensor: torch.Tensor, size: int) -> bool:
    """True if a tensor has the type, shape, strides and bytes of one whose memory has no gaps."""
    return (
        kept.dtype == tensor.dtype
        and kept.size() == tensor.size()
        and kept.stride() == tensor.stride()
        and not tensor.is_neg()
        and not _compare(kept.data_ptr(), tensor.data_ptr(), size)
    )


def is_wanted(switch: Any) -> bool:
    """True if a graph is to be rewritten, where graphs are relaunched. `switch`: Inductor's, which is on if the code is
    to have CUDA graphs; None where there is none yet. Code that can't be split is not rewritten."""
    import torch._inductor.config as inductor_config
    from torch._inductor.virtualized import V

    asked = inductor_config.triton.cudagraphs if switch is None else switch
    return bool(asked and config.cudagraph_rewrites and inductor_config.graph_partition and not V.aot_compilation)


@contextlib.contextmanager
def rewritten(gm: GraphModule, example_inputs: Sequence[Any], is_backward: bool) -> Iterator[list[Any]]:
    """Rewrite a graph, which is compiled inside. Yields the example inputs of the new graph."""
    from torch._inductor.utils import get_donated_idxs

    donated = get_donated_idxs() if is_backward else None  # the code may use their memory for something else
    found, inputs = rewrite(gm, example_inputs, donated or ())
    with current.within(found):
        yield inputs


@contextlib.contextmanager
def residing(compiled: Any) -> Iterator[Residents]:
    """Have code that is finished inside, just compiled or from a cache, called with copies of its inputs on the device.
    Yields the copies."""
    residents = Residents(CompiledNotes.of(compiled).rewrites.resident)
    yield residents
    if residents.rows:
        compiled.current_callable = residents.around(compiled.current_callable)
