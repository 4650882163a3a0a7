"""Keeps what every stage of torch.compile makes, whether the device is simulated or real: `observe()`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import time
import traceback
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

from torch_overlay import frame_facts
from torch_overlay.testing import _text
from torch_overlay.testing._origins import Origins, without_marks
from torch_overlay.testing._simulate import active


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    offloads: list[Any] = dataclasses.field(
        default_factory=list
    )  # offload_log.OffloadReport, one for each pair of graphs
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


class _Observer:
    """Wrappers of four functions of the compiler, and subscriptions to our logs, for the time of an `observe()`."""

    def __init__(self) -> None:
        self.seen = Compiled()
        self._frames: dict[Any, Frame] = {}  # by compile id, which a backward that is compiled later has, too

    def _region(self, kind: str = "inference", nodes: tuple[_text.Node, ...] = ()) -> Region:
        region = Region(self._frames.get(torch._guards.CompileContext.current_compile_id()), kind, nodes)
        self.seen.regions.append(region)
        return region

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
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

        def keep_frame(output: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if not self.seen.frames:
                self.seen.began_ns = time.time_ns()
                self.seen.at_first()
            frame = _frame(output.root_tx.f_code, gm)
            self.seen.frames.append(frame)
            self._frames[torch._guards.CompileContext.current_compile_id()] = frame
            return call_backend(output, gm, *args, **kwargs)

        def keep_graph(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
            self._region(kind, _text.nodes(gm))
            return lower(gm, *args, **kwargs)

        def keep_wrapper(graph: Any) -> Any:
            code, *rest = codegen(graph)
            regions = self.seen.regions
            region = regions[-1] if regions and regions[-1].wrapper is None else self._region()
            if isinstance(code, ValueWithLineMap):
                code = without_marks(code)
                region.lines = code.lines
            region.wrapper = getattr(code, "value", str(code))
            region.blocking = blocking_copies(graph.module)
            return code, *rest

        def keep_break(tx: Any, code_options: Any, reason: str, exc: Any) -> None:
            if not exc.logged:
                self.seen.graph_breaks.append(_graph_break(reason, exc))
            log_graph_break(tx, code_options, reason, exc)

        def keep_plan(plan: Any) -> None:
            region = self.seen.regions[-1] if self.seen.regions else self._region()
            region.plans.append(plan)
            for node in V.graph.scheduler.nodes:
                region.places[node.get_name()] = origins.lines_of([node])

        def keep_offload(found: Any) -> None:
            if hasattr(found, "choice"):
                self.seen.offloads.append(found)
            elif self.seen.regions:
                self.seen.regions[-1].copies = found

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
    observer = _Observer()
    seen = observer.seen
    simulation = active()
    logs: list[tuple[list[Any], list[Any]]] = []
    if simulation is not None:
        log = simulation.device_log
        logs = [(simulation.cudagraphs, seen.cudagraphs), (log, seen.device_log)]
        logs.append((log.while_compiling, seen.compile_log))
    starts = [len(source) for source, _ in logs]
    try:
        with observer.installed():
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
