"""Runs torch.compile down to the generated text, executes nothing, and keeps what every stage made: `compile_only`."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch.utils._pytree as pytree

from torch_overlay.testing._observe import Compiled, observe
from torch_overlay.testing._simulate import simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_overlay.testing._simulate import Simulation


def is_compiled(fn: Any) -> bool:
    return hasattr(fn, "_torchdynamo_orig_callable") or isinstance(fn, torch._dynamo.OptimizedModule)


def as_compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `fn` as `torch.compile` compiles it, or as it is if it is compiled already, which takes no options."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if isinstance(fn, type):
        raise TypeError(f"{name} is a class: pass a function, or an instance of the class")
    if not is_compiled(fn):
        return torch.compile(fn, **options)
    if given := ", ".join(f"{option}={value!r}" for option, value in options.items() if value):
        raise ValueError(
            f"{name} is compiled already, so {given} would have no effect: leave it out, or pass the function that "
            "torch.compile got"
        )
    return fn


def compile_only(
    fn: Callable[..., Any],
    *args: Any,
    mode: str | None = None,
    backward: bool = False,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    options: dict[str, Any] | None = None,
    allow_error: bool = False,
) -> Compiled:
    """Compile `fn`, call it once on `args` and, if asked, run the backward of its outputs; no kernel is executed.

    Make the inputs inside `simulated_gpu()`; a single call for a function that makes its own tensors may stand outside.
    A failure is raised, or kept in `.error` where `allow_error` is set.
    """
    if mode is not None and options is not None:
        options = {**torch._inductor.list_mode_options(mode, dynamic), **options}
        mode = None
    with simulated_gpu(), observe() as seen:
        torch._dynamo.reset()
        compiled = torch.compile(fn, mode=mode, dynamic=dynamic, fullgraph=fullgraph, options=options)
        try:
            seen.output = compiled(*args)
            if backward:
                run_backward(seen.output, "compile_only(backward=True)")
        except Exception as e:
            if not allow_error:
                raise
            seen.error = e
    return seen


def run_backward(outputs: Any, asked: str = "backward") -> None:
    """Run the backward of all outputs that require a gradient, from ones. `asked` is the option that asks for it."""
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError(f"{asked}: no output requires a gradient")
    torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])


def as_simulated(simulation: Simulation, values: Any) -> Any:
    """Replace real tensors by fake ones of the same layout."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_fake = isinstance(tensor, torch._subclasses.FakeTensor)
        return tensor if is_fake else simulation.fake_mode.from_tensor(tensor)

    return pytree.tree_map_only(torch.Tensor, convert, values)
