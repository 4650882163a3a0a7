"""Which compiled code gets a relaunched graph, and what is told about code that gets none.

`config.cudagraphs` chooses between our graphs, upstream's trees, and none; Inductor asks through the seams below. The
choice is made when a forward is compiled, and its backward follows it: autograd may compile the backward much later,
in another thread, where the option has another value.

A refusal has a reason code and a text. It is logged once for each piece of code, counted, and kept for `refusals()`.
The code then runs as compiled.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay import config


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger(__name__)

MODES = ("relaunch", "trees", "off")


@dataclass(frozen=True)
class Code:
    """A compiled region as its compiler describes it: what stays the same from call to call."""

    name: str
    device: int
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()
    saved_outputs: frozenset[int] = frozenset()  # for the backward alone: nobody else sees them
    is_backward: bool = False
    source: str = ""  # the first line of the user's program that is part of it


@dataclass(frozen=True)
class Refused:
    code: Code
    reason: str
    message: str

    def __str__(self) -> str:
        where = f" (the region begins at {self.code.source})" if self.code.source else ""
        return f"{self.code.name} runs without a CUDA graph [{self.reason}]: {self.message}{where}"


_refused: list[Refused] = []
_MOST_REFUSED = 1000


def refuse(code: Code, reason: str, message: str) -> None:
    """Logs and counts one refusal. Raises if the user asked for graphs or an error."""
    import torch._inductor.config
    from torch._dynamo.utils import counters

    found = Refused(code, reason, message)
    counters["torch_overlay"]["cudagraph_refusals"] += 1
    if found not in _refused:
        log.warning("%s", found)
        if len(_refused) < _MOST_REFUSED:
            _refused.append(found)
    if torch._inductor.config.triton.cudagraph_or_error:
        raise RuntimeError(str(found))


def refused() -> list[Refused]:
    """What was refused in this process, each once."""
    return list(_refused)


def refusals() -> list[str]:
    return list(map(str, _refused))


# ---- what Inductor compiles


class _Compiling(threading.local):
    mode: str | None = None
    graph: Any = None
    partition = 0


_compiling = _Compiling()


def chosen_mode(device_box: Any) -> str:
    """The box for the device is made once for a forward and its backward: it also carries the choice."""
    mode = getattr(device_box, "overlay_cudagraphs", None) or config.cudagraphs
    if mode not in MODES:
        raise ValueError(f"torch_overlay.config.cudagraphs is {mode!r}; it must be one of {', '.join(MODES)}")
    if device_box is not None:
        device_box.overlay_cudagraphs = mode
    return mode


@contextlib.contextmanager
def compiling(graph: Any, mode: str) -> Iterator[None]:
    before = _compiling.mode, _compiling.graph, _compiling.partition
    _compiling.mode, _compiling.graph, _compiling.partition = mode, graph, 0
    try:
        yield
    finally:
        _compiling.mode, _compiling.graph, _compiling.partition = before


def post_compile(
    original: Callable[..., None],
    example_inputs: Sequence[Any],
    compiled_graph: Any,
    cudagraphs: Any,
    constants: Any,
    boxed_forward_device_index: Any,
) -> None:
    """Seam of both ways in which compiled code is given its graphs, as a whole and by partitions."""
    mode = chosen_mode(boxed_forward_device_index)
    if mode == "off":
        type(cudagraphs).disable(cudagraphs)
        return
    with compiling(compiled_graph, mode):
        original(example_inputs, compiled_graph, cudagraphs, constants, boxed_forward_device_index)


def maybe_handle_backward_generation(original: Callable[..., None], compiled_graph: Any, device_box: Any) -> None:
    """Only trees have generations."""
    if (_compiling.mode or chosen_mode(device_box)) == "trees":
        original(compiled_graph, device_box)


def reset(original: Callable[[], None]) -> None:
    """Seam of what torch._dynamo.reset() calls to give up the graphs of the process. Something may still hold compiled
    code: a backward that is to be run, or Dynamo itself after a graph break."""
    original()
    runner = sys.modules.get("torch_overlay._inductor.cudagraphs.runner")
    if runner is not None:
        runner.forget_all()


def note_outputs(original: Callable[..., None], compiled: Any, *args: Any, **kwargs: Any) -> None:
    """Seam of CompiledFxGraph.__init__: which outputs of a graph the user sees. The graph is not there later, when the
    code is taken from the cache."""
    original(compiled, *args, **kwargs)
    gm = kwargs["gm"] if "gm" in kwargs else args[2]
    (output,) = gm.graph.find_nodes(op="output")
    compiled._overlay_visible_outputs = tuple(output.meta.get("user_visible_output_idxs", ()))


def cudagraphify(
    original: Callable[..., Any], model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **kwargs: Any
) -> Callable[..., Any]:
    mode = _compiling.mode or config.cudagraphs
    if mode == "trees":
        return make_tree(original, model, static_input_idxs, **kwargs)
    if mode == "off" or kwargs.get("kernel_free_cudagraph"):
        return model
    from torch_overlay._inductor.cudagraphs.runner import Runner

    return Runner(model, describe(static_input_idxs, **kwargs))


def make_tree(
    original: Callable[..., Any], model: Callable[..., Any], static_input_idxs: Sequence[int], **kwargs: Any
) -> Callable[..., Any]:
    return original(model, static_input_idxs, **kwargs)


def describe(
    static_input_idxs: Sequence[int],
    *,
    device_index: int,
    is_backward: bool,
    is_inference: bool,
    stack_traces: Sequence[str | None] = (),
    placeholders: Sequence[Any] = (),
    mutated_input_idxs: Sequence[int] = (),
    **_: Any,
) -> Code:
    from torch._guards import CompileContext

    kind = "backward" if is_backward else "inference" if is_inference else "forward"
    name = f"{kind} of compiled frame {CompileContext.current_compile_id() or '?'}"
    graph, number = _compiling.graph, _compiling.partition
    _compiling.partition += 1
    maps = getattr(graph, "partition_maps", None)
    partition = maps[number] if maps and _is_partitioned(graph) and number < len(maps) else None
    if partition is not None and len(maps or ()) > 1:
        name += f", partition {number}"
    traces = [t for p in placeholders for u in p.users if (t := u.stack_trace)] + [t for t in stack_traces if t]
    return Code(
        name=name,
        device=device_index,
        static_inputs=tuple(static_input_idxs),
        mutated_inputs=tuple(mutated_input_idxs),
        saved_outputs=_saved(graph, partition) if kind == "forward" else frozenset(),
        is_backward=is_backward,
        source=source_line(traces[0]) if traces else "",
    )


def _is_partitioned(graph: Any) -> bool:
    import torch._inductor.config as inductor_config

    return bool(inductor_config.graph_partition and inductor_config.cudagraph_policy is None)


def _saved(graph: Any, partition: Any) -> frozenset[int]:
    """The outputs of a forward behind those that the user sees. What a partition hands to the next one is none."""
    visible = getattr(graph, "_overlay_visible_outputs", ())
    if not visible:
        return frozenset()
    first = max(visible) + 1
    if partition is None:
        return frozenset(range(first, len(graph.cudagraph_info.stack_traces)))
    outputs = enumerate(partition.output_index_mapping)
    return frozenset(i for i, among in outputs if among and min(among) >= first)


def source_line(stack_trace: str) -> str:
    """The innermost line of the user's program in a stack trace as FX keeps it."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in ([^\n]+)(?:\n\s*([^\n]+))?', stack_trace)
    if not frames:
        return ""
    file, line, _, text = frames[-1]
    return f"{file}:{line}: {text.strip()}" if text else f"{file}:{line}"
