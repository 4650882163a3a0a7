"""Lists why work runs outside of CUDA graphs: a code, a title and a remedy for each cause.

A refusal, a split and a drop all name a code of this table. `docs/cuda_graphs.md` lists the same codes. Each different
refusal of a region is logged once and kept for `refusals()`; all are counted. The code then runs as compiled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Kind:
    """A kind of causes."""

    title: str  # what is outside of a graph, and why
    remedy: str  # what the user can do; empty: nothing


_MOVE_OUT = "move the operation to the beginning or the end of the compiled function, or out of it"
_REPORT = "please report it with the log of TORCH_LOGS=torch_overlay"
_SPLIT_BY_NAME = 'name the operator in torch._inductor.config.custom_should_partition_ops: ["mylib::op"]'

CAUSES: dict[str, Kind] = {
    # What Inductor splits off: it runs between two graphs.
    "split-host": Kind("an operation on the host", "keep its tensors on the device, with device= where they are made"),
    "split-devices": Kind("an operation on two devices", _MOVE_OUT),
    "split-control-flow": Kind(
        "switch, while_loop, scan, or a torch.cond that the device can't choose by: the host reads the condition",
        "torch.where computes both sides and stays in a graph, where both may be computed",
    ),
    "split-data-dependent": Kind(
        "an operation whose result has a size, or a number, that depends on data",
        "a mask of fixed size (torch.where) instead of indices; a tensor instead of .item()",
    ),
    "split-unsafe": Kind("an operator that is known to synchronise or to allocate on its own", _MOVE_OUT),
    "split-failed": Kind(
        "an operator in which a capture failed", "an operator that neither synchronises nor uses another stream"
    ),
    "split-named": Kind("an operator named in custom_should_partition_ops", ""),
    "split-dynamic": Kind(
        "an operation on dynamic sizes", "torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = False"
    ),
    "split-small": Kind(
        "a partition of few kernels", "lower torch._inductor.config.triton.cudagraph_min_partition_size"
    ),
    "split-collective": Kind("a collective: its order across ranks is that of the program", ""),
    "split-streams": Kind("an operation on the caller's streams or events", ""),
    "split-zeros": Kind("a gradient of zeros, which has no memory: nothing is launched for it", ""),
    "split-other": Kind("an operation that Inductor splits off", _MOVE_OUT),
    # What the compiler refuses.
    "inductor": Kind("Inductor made no graph of this code", "its message says what to change"),
    "split": Kind("all of the code is split off", "give the operations that stand between them one function"),
    "cpp-wrapper": Kind("code with a C++ wrapper", "torch._inductor.config.cpp_wrapper = False"),
    "graph-break": Kind(
        "a graph break cuts the function in two", "the hint of the break; TORCH_LOGS=graph_breaks shows it"
    ),
    "host-wait": Kind(
        "the host waits for the device", "keep the value on the device, or read it once every many steps"
    ),
    # What the doctor sees beside compiled code.
    "eager": Kind(
        "operators outside of compiled code", 'move them into a function that is compiled with mode="reduce-overhead"'
    ),
    "eager-optimizer": Kind(
        "an optimizer that runs in eager",
        'compile its step: step = torch.compile(optimizer.step, mode="reduce-overhead")',
    ),
    "eager-backward": Kind(
        "operators of autograd outside of compiled code",
        "compute the loss inside of the compiled function; optimizer.zero_grad() before each backward",
    ),
    "recompiled": Kind(
        "a function that is compiled more than once",
        "torch._dynamo.mark_dynamic(x, dim) before the first call, for a size that changes; a tensor for a number",
    ),
    # What the first calls show.
    "warm-up": Kind("the first call of a size, a number or a thread runs as compiled", ""),
    "callers-capture": Kind("calls inside of a capture of the caller's are captured as compiled", ""),
    "number": Kind("a number is larger than what a parameter of the graph holds", ""),
    "size-waits": Kind("calls of a size that has not yet come often enough to pay for its capture", ""),
    "busy": Kind("another thread captures meanwhile", ""),
    "templates": Kind(
        "more sizes or numbers than a region keeps graphs for",
        "pad to a few sizes, or raise torch_overlay.config.cudagraph_templates",
    ),
    "host-tensor": Kind("a large tensor in host memory, which the graph would hold", "move it to the device"),
    "input": Kind("an input that is not a plain strided tensor", "convert it before the call"),
    "device": Kind("an input on another device", "compile the code of each device by itself"),
    # What a capture shows.
    "operator": Kind(
        "the capture failed in an operator", "an operator that neither synchronises nor uses another stream"
    ),
    "capture": Kind("the capture failed", "the log at INFO shows the traceback"),
    "out-of-memory": Kind("the capture found no memory", "free memory before the second call, or use smaller batches"),
    "kept": Kind(
        "memory of the capture is still in use after it", "keep no tensor that was allocated inside the function"
    ),
    "output": Kind("an output that is not a plain strided tensor", "convert it outside of the compiled function"),
    "collective": Kind("a collective inside of the region", _SPLIT_BY_NAME),
    "streams": Kind(
        "the region orders streams of the caller's", "torch._inductor.config.graph_partition = True splits that off"
    ),
    "host-memory": Kind("a copy to or from the host that can't be patched", "pin the memory, or move the copy out"),
    "condition": Kind("a condition that the device can't choose by", "a driver of CUDA 12.8 or later"),
    "allocator": Kind("an allocator that can't allocate elsewhere for a capture", "use torch's native allocator"),
    "c-module": Kind("the C module can't be built", "install a C compiler, or set CC"),
    # What the proof shows.
    "unmoved": Kind("an argument of a kernel may be an address, but didn't move with a tensor", _SPLIT_BY_NAME),
    "outside": Kind("a kernel has an address outside of the region's tensors", _SPLIT_BY_NAME),
    "scalar": Kind("a number that a kernel gets differs between two captures", _SPLIT_BY_NAME),
    "encoded": Kind("a kernel has an address that is packed with other data", _SPLIT_BY_NAME),
    "foreign": Kind("a kernel has an address in memory that is none of the region's", _SPLIT_BY_NAME),
    "ambiguous": Kind("an argument of a kernel can be read as two addresses", _REPORT),
    "moved": Kind("an address that should stay has moved", _REPORT),
    "layout": Kind("two captures of the region differ in their memory", _SPLIT_BY_NAME),
    "nodes": Kind("two captures of the region differ in their kernels", _SPLIT_BY_NAME),
    "edges": Kind("two captures of the region differ in their order", _SPLIT_BY_NAME),
    "launch": Kind("two captures of the region differ in a kernel's grid", _SPLIT_BY_NAME),
    "segments": Kind("memory of the capture overlaps", _REPORT),
    "shape": Kind("a copy or a fill of a shape that can't be patched", _MOVE_OUT),
    "signature": Kind("a kernel's parameters are not those of its signature", _REPORT),
    "node-kind": Kind("the graph has a kind of node that can't be patched", _SPLIT_BY_NAME),
}


def of_partition(reason: str) -> str:
    """Return the code for Inductor's reason to split an operation off."""
    for begin, code in (
        ("stream operation", "split-streams"),
        ("zeros without memory", "split-zeros"),
        ("custom partition op", "split-named"),
        ("cross-device", "split-devices"),
        ("Switch ops", "split-control-flow"),
        ("unbacked binding", "split-data-dependent"),
        ("uses cudagraph-unsafe unbacked", "split-data-dependent"),
        ("CUDAGraph-unsafe", "split-unsafe"),
        ("dynamic shape", "split-dynamic"),
        ("fewer kernels", "split-small"),
    ):
        if reason.startswith(begin):
            return code
    return "split-host" if reason.endswith(" ops") else "split-other"


# Namespaces of operators that communicate with other processes: Note [Collectives], in `policy`.
COMMUNICATION = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cause:
    """Why work is outside of CUDA graphs, or why the host waits for the device."""

    code: str  # of `CAUSES`
    operator: str
    line: str  # "file:line: text" of the user's program, or empty
    message: str
    remedy: str

    @classmethod
    def of(cls, code: str, message: str = "", *, operator: str = "", line: str = "", **more: Any) -> Self:
        """Return a cause with the remedy of its kind, and with the title, if there is no message."""
        kind = CAUSES[code]
        return cls(code, operator, line, message or kind.title, kind.remedy, **more)


@dataclass(frozen=True)
class Refused(Cause):
    region: CodeFacts

    def __str__(self) -> str:
        where = self.line or (f"the region begins at {self.region.source}" if self.region.source else "")
        text = f"{self.region.name} runs without a CUDA graph [{self.code}]: {self.message}"
        return f"{text} ({where})" if where else text


_refused: list[Refused] = []
_MOST_REFUSED = 1000


def refuse(found: Refused) -> None:
    """Log and count one refusal. Raises if the user asked for graphs or an error (`triton.cudagraph_or_error`)."""
    import torch._inductor.config
    from torch._dynamo.utils import counters

    counters["torch_overlay"]["cudagraph_refusals"] += 1
    if found not in _refused:
        log.warning("%s", found)
        if len(_refused) < _MOST_REFUSED:
            _refused.append(found)
    if torch._inductor.config.triton.cudagraph_or_error:
        raise RuntimeError(str(found))


def refused() -> list[Refused]:
    """Return the refusals of this process, each once."""
    return list(_refused)


def refusals() -> list[str]:
    return list(map(str, _refused))


@dataclass(frozen=True)
class CodeFacts:
    """A compiled region as its compiler describes it: properties that are the same at each call."""

    name: str
    device: int
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()  # that it may write to
    saved_outputs: frozenset[int] = frozenset()  # saved tensors for the backward, which the user doesn't see
    is_backward: bool = False
    source: str = ""  # the first line of the user's program that the region was compiled from
    compile_id: Any = None  # Dynamo's, of the frame that it was compiled for, if that could be cut at an operator
    # Positions of numbers that no tensor's size or stride depends on; negative ones count from the end.
    numbers: frozenset[int] = frozenset()

    @property
    def is_training(self) -> bool:
        return self.is_backward or bool(self.saved_outputs)
