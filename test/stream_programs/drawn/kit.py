"""What the text of a drawn program uses, and how the text becomes a program of the corpus' kind.

program = as_program(write(spec), "drawn_0_17")
"""

from __future__ import annotations

import linecache
from typing import Any, TYPE_CHECKING

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from stream_programs import _ops  # noqa: F401  (registers the operators)
from stream_programs._program import Inputs, Instance, Kit, Program, tensors, whole_numbers
from stream_programs.drawn.operations import FULL, LOADED, SIZE


try:
    from user_kernels import scaled_into
except ImportError:  # there is no Triton
    scaled_into = None

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stream_programs.drawn.writer import Written

    Maker = Callable[[str, torch.Generator], Any]
    Loads = tuple[torch.cuda.Stream, Sequence[int]] | None

matrix = whole_numbers(*FULL)


def complex_matrix(device: str, generator: torch.Generator) -> torch.Tensor:
    return torch.complex(matrix(device, generator), matrix(device, generator))


def sometimes_misaligned(make: Maker, elements: int) -> Maker:
    """A matrix that is aligned at the first call, and at every third one lies where no vector load may read it.

    It is no view of another tensor: where a graph gets two views of one and updates them, stock AOTAutograd takes them
    from their base at the offsets of the first call, without a guard (`aot_eager` returns wrong numbers).
    """

    def made(device: str, generator: torch.Generator) -> torch.Tensor:
        offset = elements if generator.initial_seed() % 3 == 2 else 0
        values = make(device, generator)
        memory = torch.empty(values.numel() + offset, dtype=values.dtype, device=values.device)
        return memory[offset:].view(values.shape).detach().copy_(values)

    return made


ARGUMENTS: dict[str, Maker] = {
    "x": matrix,
    "y": matrix,
    "state": matrix,
    "z": complex_matrix,
    "pinned": whole_numbers(*FULL, pinned=True),
    "out": whole_numbers(*FULL, pinned=True),
    "ready": lambda device, generator: torch.cuda.Event(),
    "n": lambda device, generator: 3,
}


def weight(k: Kit, trained: bool = False) -> torch.Tensor:
    """A matrix with two entries in each row and column: products with it stay small."""
    rows = torch.eye(SIZE)
    first, second = (rows[torch.randperm(SIZE, generator=k.generator)] for _ in range(2))
    return (first - second).to("cuda").requires_grad_(trained)


def _loaded(source: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the current stream, aligned as the source is."""
    offset = source.storage_offset()
    memory = torch.empty(offset + source.numel(), dtype=source.dtype, device=source.device)
    return memory[offset:].view(source.shape).detach().copy_(source)


def _load(inputs: Sequence[Any], loads: Loads) -> list[Any]:
    """The inputs, of which those at some positions are filled on a stream that nobody has waited for."""
    if loads is None:
        return list(inputs)
    stream, positions = loads
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return [_loaded(t) if i in positions else t for i, t in enumerate(inputs)]


def calls(k: Kit, fn: Callable[..., Any], kept: Sequence[torch.Tensor] = (), loads: Loads = None) -> Callable[..., Any]:
    """The function, as it is called. `kept` are tensors of its own that it changes."""
    compiled = k.compile(fn)

    def call(*inputs: Any) -> Any:
        return compiled(*_load(inputs, loads))

    call.kept = kept  # type: ignore[attr-defined]
    return call


def trains(
    k: Kit,
    fn: Callable[..., Any],
    argument: int | None,
    weights: Sequence[torch.Tensor],
    kept: Any = (),
    loads: Loads = None,
) -> Callable[..., Any]:
    """A training step: the forward, the backward of what carries a gradient, the gradients of input and weights."""
    compiled = k.compile(fn)

    def step(*inputs: Any) -> Any:
        given = _load(inputs, loads)
        leaves = list(weights)
        if argument is not None:
            given[argument] = given[argument].detach().requires_grad_()
            leaves.append(given[argument])
        outputs = pytree.tree_leaves(compiled(*given))
        roots = [t for t in outputs if t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        # AOTAutograd gives zeros where eager gives none: after what a graph break handed on and nobody used.
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return [t.detach() for t in outputs], gradients

    step.kept = kept  # type: ignore[attr-defined]
    return step


def finish(instance: Instance, inputs: Inputs, outputs: Any) -> Any:
    """A caller that joins what the function didn't, and looks at what it keeps."""
    return outputs, [t.clone() for t in instance.fn.kept]  # type: ignore[attr-defined]


def joins(instance: Instance, inputs: Inputs, outputs: Any) -> Any:
    instance.join()
    return finish(instance, inputs, outputs)


def synchronizes(instance: Instance, inputs: Inputs, outputs: Any) -> Any:
    torch.cuda.synchronize()
    return finish(instance, inputs, outputs)


current: Any = None  # for linters: programs that are found name it, and their text has the stream
double, both, add_to = (getattr(torch.ops.overlay_test, name) for name in ("double", "both", "add_to"))

SCOPE: dict[str, Any] = {"torch": torch, "F": F, "double": double, "both": both, "add_to": add_to}
SCOPE |= {"scaled_into": scaled_into, "weight": weight, "calls": calls, "trains": trains}


def inputs_of(*names: str, misaligned: int = 0) -> Callable[[str, torch.Generator], Inputs]:
    """`misaligned`: by so many elements, in some calls."""
    made = ARGUMENTS | ({n: sometimes_misaligned(ARGUMENTS[n], misaligned) for n in LOADED} if misaligned else {})
    return tensors(*(made[name] for name in names))


def as_program(written: Written, name: str) -> Program:
    path = f"/drawn/{name}.py"
    linecache.cache[path] = (len(written.text), None, written.text.splitlines(True), path)
    scope = dict(SCOPE)
    exec(compile(written.text, path, "exec"), scope)
    return Program(
        name,
        "drawn at random",
        scope["build"],
        inputs_of(*written.inputs, misaligned=written.misaligned),
        finish=synchronizes if written.host else joins if written.unjoined else finish,
        fullgraph=written.fullgraph,
        frames=True,
        options={"fallback_random": True, "reorder_for_peak_memory": False} if written.random else {},
        random=written.random,
        host_reads=written.host,
        ordered=True,
        group="drawn",
    )
