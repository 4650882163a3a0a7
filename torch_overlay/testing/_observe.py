"""Keeps what every stage of torch.compile makes, whether the device is simulated or real: `observe()`. `compile_only()`
runs torch.compile down to the generated text on the simulated device, and executes nothing.

Note [The user's lines of generated code]
Inductor writes the names of source nodes above most kernels, and above no copy; its own map of lines leaves partitions
out. So the observed scheduler leaves a mark where it begins a node. The marks come out of the finished text again,
which is what it would be without them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import time
import traceback
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._inductor.utils import LineContext, ValueWithLineMap
from torch._inductor.virtualized import V

from torch_overlay import frame_facts
from torch_overlay.hooks import put_in_place
from torch_overlay.testing import _text
from torch_overlay.testing._simulate import active, simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch_overlay.testing._simulate import Simulation


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo split a frame, and where the user's code made it do so."""

    reason: str
    explanation: str
    hints: tuple[str, ...]
    file: str
    line: int
    code: str

    def __str__(self) -> str:
        lines = [f"{self.file}:{self.line}: {self.code}", f"    {self.reason}", f"    {self.explanation}"]
        return "\n".join([*lines, *(f"    hint: {h}" for h in self.hints)])


@dataclasses.dataclass(frozen=True)
class Frame:
    """One graph that Dynamo took from the user's code. `syncs` counts the stream operations that the user wrote there
    (`wait_stream` is one operation that eager turns into a record and a wait); `objects` are its streams and events.
    """

    name: str
    file: str
    line: int
    syncs: collections.Counter[str]
    objects: tuple[Any, ...]

    @property
    def records(self) -> int:
        return self.syncs["record_event"] + self.syncs["wait_stream"]

    @property
    def waits(self) -> int:
        return self.syncs["wait_event"] + self.syncs["wait_stream"]


@dataclasses.dataclass
class Region:
    """One graph after AOTAutograd, on its way through Inductor."""

    frame: Frame | None
    kind: str  # "inference", "forward" or "backward"
    nodes: tuple[_text.Node, ...] = ()
    wrapper: str | None = None
    lines: tuple[str, ...] = ()  # the user's lines of each line of `wrapper`, joined by "; "
    plans: list[Any] = dataclasses.field(default_factory=list)
    places: dict[str, str] = dataclasses.field(default_factory=dict)  # the user's lines of each operation of the plans
    copies: Any = None  # of saved activations: offload_log.CopySchedule
    blocking: list[Any] = dataclasses.field(default_factory=list)  # blocking_copies.BlockingCopy

    @property
    def graph(self) -> str:
        return "\n".join(str(n) for n in self.nodes)


@dataclasses.dataclass
class Compiled:
    """The results of the compilations of one program, each list in order of compilation."""

    frames: list[Frame] = dataclasses.field(default_factory=list)
    regions: list[Region] = dataclasses.field(default_factory=list)
    graph_breaks: list[GraphBreak] = dataclasses.field(default_factory=list)
    # offload_log.OffloadReport, one for each pair of graphs
    offloads: list[Any] = dataclasses.field(default_factory=list)
    cudagraphs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    device_log: list[str] = dataclasses.field(default_factory=list)
    compile_log: list[str] = dataclasses.field(default_factory=list)
    output: Any = None
    error: Exception | None = None
    began_ns: int = 0  # time at which the first graph reached the compiler
    at_first: Callable[[], None] = lambda: None  # called then

    @property
    def graphs(self) -> list[str]:
        """FX graphs after AOTAutograd, one node a line, with the stream of each node."""
        return [r.graph for r in self.regions]

    @property
    def wrappers(self) -> list[str]:
        """The generated modules."""
        return [r.wrapper for r in self.regions if r.wrapper is not None]

    @property
    def plans(self) -> list[Any]:
        """The stream planner's plans; a region without streams has none."""
        return [p for r in self.regions for p in r.plans]

    def calls(self, index: int | None = None) -> str:
        """Return the bodies of `call` and of the partitions, normalised for goldens: of one wrapper, or of all."""
        chosen = self.wrappers if index is None else [self.wrappers[index]]
        return "\n".join(_text.call_bodies(w) for w in chosen)


@contextlib.contextmanager
def _kept(seen: Compiled) -> Iterator[None]:
    """Wrap four functions of the compiler, and subscribe to our logs."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import ValueWithLineMap
    from torch._inductor.virtualized import V

    from torch_overlay._functorch.offload import log as offload_log
    from torch_overlay._inductor.streams import planned_region
    from torch_overlay.analysis.blocking_copies import blocking_copies

    origins = Origins()
    call_backend = OutputGraph.call_user_compiler
    lower = compile_fx.fx_codegen_and_compile
    codegen = GraphLowering.codegen
    log_graph_break = InstructionTranslatorBase.log_graph_break

    frames: dict[Any, Frame] = {}  # by compile id, which a backward that is compiled later has, too

    def new_region(kind: str = "inference", nodes: tuple[_text.Node, ...] = ()) -> Region:
        region = Region(frames.get(torch._guards.CompileContext.current_compile_id()), kind, nodes)
        seen.regions.append(region)
        return region

    def keep_frame(output: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if not seen.frames:
            seen.began_ns = time.time_ns()
            seen.at_first()
        frame = _frame(output.root_tx.f_code, gm)
        seen.frames.append(frame)
        frames[torch._guards.CompileContext.current_compile_id()] = frame
        return call_backend(output, gm, *args, **kwargs)

    def keep_graph(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        new_region(kind, _text.nodes(gm))
        return lower(gm, *args, **kwargs)

    def keep_wrapper(graph: Any) -> Any:
        code, *rest = codegen(graph)
        regions = seen.regions
        region = regions[-1] if regions and regions[-1].wrapper is None else new_region()
        if isinstance(code, ValueWithLineMap):
            code = without_marks(code)
            region.lines = code.lines
        region.wrapper = getattr(code, "value", str(code))
        region.blocking = blocking_copies(graph.module)
        return code, *rest

    def keep_break(tx: Any, code_options: Any, reason: str, exc: Any) -> None:
        if not exc.logged:
            seen.graph_breaks.append(_graph_break(reason, exc))
        log_graph_break(tx, code_options, reason, exc)

    def keep_plan(plan: Any) -> None:
        region = seen.regions[-1] if seen.regions else new_region()
        region.plans.append(plan)
        for node in V.graph.scheduler.nodes:
            region.places[node.get_name()] = origins.lines_of([node])

    def keep_offload(found: Any) -> None:
        if hasattr(found, "choice"):
            seen.offloads.append(found)
        elif seen.regions:
            seen.regions[-1].copies = found

    with (
        origins.marked(),
        mock.patch.object(OutputGraph, "call_user_compiler", keep_frame),
        mock.patch.object(compile_fx, "fx_codegen_and_compile", keep_graph),
        mock.patch.object(GraphLowering, "codegen", keep_wrapper),
        mock.patch.object(InstructionTranslatorBase, "log_graph_break", keep_break),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(planned_region.subscribe_to_plans(keep_plan))
        stack.callback(offload_log.subscribe(keep_offload))
        yield


@contextlib.contextmanager
def observe() -> Iterator[Compiled]:
    """Collect what torch.compile makes inside, on a simulated or a real device."""
    seen = Compiled()
    simulation = active()
    logs: list[tuple[list[Any], list[Any]]] = []
    if simulation is not None:
        log = simulation.device_log
        logs = [(simulation.cudagraphs, seen.cudagraphs), (log, seen.device_log)]
        logs.append((log.while_compiling, seen.compile_log))
    starts = [len(source) for source, _ in logs]
    try:
        with _kept(seen):
            yield seen
    finally:
        for start, (source, target) in zip(starts, logs):
            target.extend(source[start:])


def _frame(code: Any, gm: torch.fx.GraphModule) -> Frame:
    targets = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]  # streams.record_event[.default]
    names = [t.split(".")[1] for t in targets if t.startswith("streams.")]
    objects = frame_facts.current().objects
    return Frame(code.co_name, code.co_filename, code.co_firstlineno, collections.Counter(names), objects)


def _graph_break(reason: str, exc: Any) -> GraphBreak:
    stack = getattr(exc, "real_stack", None) or torch._guards.TracingContext.extract_stack()
    message = getattr(exc, "msg", None) or reason
    title, _, rest = message.partition("\n")
    explanation = re.search(r"^  Explanation: (.*(?:\n    .*)*)", rest, re.MULTILINE)
    hints = re.findall(r"^  Hint: (.*(?:\n    .*)*)", rest, re.MULTILINE)
    frame = stack[-1] if stack else traceback.FrameSummary("<unknown>", 0, "")
    return GraphBreak(
        title,
        _one_line(explanation[1]) if explanation else "",
        tuple(_one_line(h) for h in hints),
        frame.filename,
        frame.lineno or 0,
        (frame.line or "").strip(),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


_MARK = "# user's lines of the following: "
_MARKED = re.compile(rf"\s*{_MARK}(.*)$")
_END = re.compile(r"\s*(def |class |return |finally:)")


class _Mark(LineContext):
    """Begins the lines of one node of the schedule. Passes over a wrapper's lines leave a line's context alone."""

    @property
    def text(self) -> str:
        return f"{_MARK}{self.context}"


class Origins:
    def __init__(self) -> None:
        self.scheduler: Any = None
        self.calls: set[torch.fx.Node] = set()
        self.order: dict[torch.fx.Node, int] = {}  # position in its graph

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Mark the nodes of all code that is generated inside the context."""
        from torch._inductor.codegen.cpp import KernelGroup
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.scheduler import Scheduler

        put_in_place()
        make_scheduler, call, make_wrapper = Scheduler.__init__, KernelGroup.call_kernel, PythonWrapperCodegen.__init__

        def marking_scheduler(scheduler: Any, nodes: Any) -> None:
            make_scheduler(scheduler, nodes)
            scheduler.enter_context = functools.partial(mark_node, scheduler.enter_context, scheduler)

        def mark_node(enter: Callable[..., None], scheduler: Any, node: Any) -> None:
            self.mark(V.graph.wrapper_code, [node])
            enter(node)

        def mark_host_kernel(group: Any, wrapper: Any, name: str) -> None:
            """Mark a kernel of the host, which is called when a later node has begun."""
            begun = next((line for line in reversed(wrapper.lines) if isinstance(line, _Mark)), None)
            self.mark(wrapper, group.scheduled_nodes)
            call(group, wrapper, name)
            if begun is not None:
                wrapper.lines.append(begun)

        def marking_wrapper(wrapper: Any) -> None:
            make_wrapper(wrapper)
            wrapper.run_wrapper_ir_passes = functools.partial(write_marks, wrapper.run_wrapper_ir_passes, wrapper)

        def write_marks(finish: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            wrapper.lines = [line.text if isinstance(line, _Mark) else line for line in wrapper.lines]

        with (
            mock.patch.object(Scheduler, "__init__", marking_scheduler),
            mock.patch.object(KernelGroup, "call_kernel", mark_host_kernel),
            mock.patch.object(PythonWrapperCodegen, "__init__", marking_wrapper),
        ):
            yield

    def mark(self, wrapper: Any, nodes: Iterable[Any]) -> None:
        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            return
        wrapper.lines.append(_Mark(self.lines_of(nodes)))

    def lines_of(self, nodes: Iterable[Any]) -> str:
        """Return the user's lines that nodes of a schedule come from, joined by "; "."""
        parts = [part for node in nodes for part in node.get_nodes()]
        found = self.origins(parts)
        # An operator that needs its input in memory is an origin of the kernel that computes this input, too.
        while len(found) > 1 and found[-1] in self.calls_of(V.graph.scheduler) and not parts[-1].is_extern():
            found.pop()
        return "; ".join(dict.fromkeys(line for o in found if (line := _text.line_of(o))))

    def origins(self, parts: Iterable[Any]) -> list[torch.fx.Node]:
        """Return the operators that nodes of a schedule come from, in the order of their graph."""
        found = {o for part in parts if part.node is not None for o in part.node.get_origins()}
        for graph in {o.graph for o in found if o not in self.order}:
            self.order.update({o: i for i, o in enumerate(graph.nodes)})
        return sorted((o for o in found if o.op == "call_function"), key=self.order.__getitem__)

    def calls_of(self, scheduler: Any) -> set[torch.fx.Node]:
        """Return the operators that a schedule calls: copies, and kernels of libraries."""
        if scheduler is not self.scheduler:
            parts = [part for node in scheduler.nodes for part in node.get_nodes() if part.is_extern()]
            self.scheduler, self.calls = scheduler, {found[-1] for part in parts if (found := self.origins([part]))}
        return self.calls


@dataclasses.dataclass
class Code(ValueWithLineMap):
    """Generated code without marks; `lines` has the user's lines of each of its lines, joined by "; "."""

    lines: tuple[str, ...]


def without_marks(code: ValueWithLineMap) -> Code:
    if isinstance(code, Code):  # another observer has taken them out
        return code
    kept, lines, marks, current = [], [], [], ""
    for number, row in enumerate(code.value.split("\n"), 1):
        if match := _MARKED.match(row):
            current = match[1]
            marks.append(number)
            continue
        if _END.match(row):
            current = ""
        kept.append(row)
        lines.append(current)
    line_map = [(at - sum(mark < at for mark in marks), context) for at, context in code.line_map]
    return Code("\n".join(kept), line_map, tuple(lines))


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


__all__ = ["Origins", "without_marks"]
