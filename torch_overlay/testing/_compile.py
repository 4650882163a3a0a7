"""`compile_only`: run torch.compile down to the generated text, execute nothing, and keep what every stage made."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree

from torch_overlay.testing import _text
from torch_overlay.testing._simulate import active, simulated_gpu


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo split a frame, and where the user's code made it do so."""

    reason: str
    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}\n    {self.reason}"


@dataclasses.dataclass
class Compiled:
    """What the compilations of one program left behind, each list in order of compilation."""

    graphs: list[str] = dataclasses.field(default_factory=list)
    wrappers: list[str] = dataclasses.field(default_factory=list)
    graph_breaks: list[GraphBreak] = dataclasses.field(default_factory=list)
    plans: list[Any] = dataclasses.field(default_factory=list)
    cudagraphs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    device_log: list[str] = dataclasses.field(default_factory=list)
    output: Any = None
    error: Exception | None = None

    def calls(self, index: int | None = None) -> str:
        """The bodies of `call` and of the partitions, normalised for goldens: of one wrapper, or of all."""
        chosen = self.wrappers if index is None else [self.wrappers[index]]
        return "\n".join(_text.call_bodies(w) for w in chosen)


@contextlib.contextmanager
def observe() -> Iterator[Compiled]:
    """Collect what torch.compile does inside, simulated or real."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    seen = Compiled()
    lower, codegen = compile_fx.fx_codegen_and_compile, GraphLowering.codegen
    log_graph_break = InstructionTranslatorBase.log_graph_break

    def keep_graph(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.graphs.append(_text.graph(gm))
        return lower(gm, *args, **kwargs)

    def keep_wrapper(self: GraphLowering) -> Any:
        result = codegen(self)
        seen.wrappers.append(getattr(result[0], "value", str(result[0])))
        return result

    def keep_break(self: InstructionTranslatorBase, code_options: Any, reason: str, exc: Any) -> None:
        if not exc.logged:
            seen.graph_breaks.append(_graph_break(reason, exc))
        log_graph_break(self, code_options, reason, exc)

    with (
        mock.patch.object(compile_fx, "fx_codegen_and_compile", keep_graph),
        mock.patch.object(GraphLowering, "codegen", keep_wrapper),
        mock.patch.object(InstructionTranslatorBase, "log_graph_break", keep_break),
        _plans(seen.plans),
    ):
        simulation = active()
        first_graph = len(simulation.cudagraphs) if simulation else 0
        first_line = len(simulation.device_log) if simulation else 0
        try:
            yield seen
        finally:
            if simulation:
                seen.cudagraphs.extend(simulation.cudagraphs[first_graph:])
                seen.device_log.extend(simulation.device_log[first_line:])


def _graph_break(reason: str, exc: Any) -> GraphBreak:
    stack = getattr(exc, "real_stack", None) or torch._guards.TracingContext.extract_stack()
    text = str(exc).strip() or reason
    if not stack:
        return GraphBreak(text, "<unknown>", 0, "")
    frame = stack[-1]
    return GraphBreak(text, frame.filename, frame.lineno or 0, (frame.line or "").strip())


@contextlib.contextmanager
def _plans(plans: list[Any]) -> Iterator[None]:
    try:
        from torch_overlay._inductor import plan_log
    except ImportError:  # the planner is not part of this build
        yield
        return
    unsubscribe = plan_log.subscribe(plans.append)
    try:
        yield
    finally:
        unsubscribe()


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
    """Compile `fn`, call it once on `args` and, if asked, run the backward of its outputs; nothing executes on a device.

    Inputs are made inside `simulated_gpu()`; around a single call it may be left out, for a function that makes its own
    tensors. A failure is raised, or kept in `.error` where `allow_error` is set.
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
                _backward(seen.output)
        except Exception as e:
            if not allow_error:
                raise
            seen.error = e
    return seen


def _backward(output: Any) -> None:
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("compile_only(backward=True): no output requires a gradient")
    torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])
