"""The programs of `stream_programs`, checked as a test checks them: on simulated GPUs, with the promises of eager."""

from typing import Any

import torch

import form  # noqa: F401
from stream_programs import Program, PROGRAMS
from stream_programs._quiet import quiet
from torch_overlay import config
from torch_overlay.analysis.race_check.checking import check
from torch_overlay.analysis.race_check.race_report import describe, Report
from torch_overlay.testing import Compiled, observe, placement_checked, simulated_gpu


# Programs with events that they could do without, and what their compiler doesn't know or doesn't use.
NEEDLESS = {
    "aux_stream_of_second_device": "that a stream of the frame is the other device's current one",
    "copy_from_another_device": "that a stream of the frame is the other device's current one",
    "cached_property": "that a stream is new",
    "external_stream": "that two streams have one handle",
    "pageable_memory": "that memory which comes in is pageable, so that the host waits for a copy",
    "ring_of_two_streams": "that the last graph does nothing that another stream is promised",
    "size_on_side_stream": "that memory of the stream which a graph reads isn't freed there",
    "stream_returned": "that a stream is new",
    "train_checkpoint_around": "that a backward is called on its side stream",
    "train_graph_break_in_block": "what lies between frames",
    "train_loss_on_side_stream": "that a backward is called on its side stream",
    "train_on_second_device": "that a stream of the frame is the other device's current one",
    "train_reentrant_checkpoint_around": "that a backward is called on its side stream",
    "train_saved_value_as_gradient": "that a backward without kernels has ordered its streams",
    "train_saved_value_as_unjoined_gradient": "that a backward without kernels has ordered its streams",
    "train_stream_across_graph_break": "what lies between frames",
}


def cases(programs: Any = PROGRAMS) -> list[tuple[str, str]]:
    """Each program in each of its modes."""
    return [(p.name, mode or "default") for p in programs for mode in p.modes]


def mode_of(text: str) -> str | None:
    return None if text == "default" else text


def compile_program(
    program: Program, mode: str | None = None, *, sleeps: bool = False, fold: bool = False
) -> tuple[Compiled, Any]:
    """Compile a program of the corpus down to wrapper text. Return what was generated, and what the call returned."""
    torch._dynamo.reset()
    threshold = config.fold_branches_below_us if fold else 0.0
    with simulated_gpu(2), observe() as seen, config.patch(fold_branches_below_us=threshold):
        instance = program.instance(program.compiler(mode), sleeps)
        return seen, instance.fn(*program.make_inputs("cuda", torch.Generator().manual_seed(1)))


def check_program(
    program: Program, mode: str | None = None, *, sleeps: bool = False, fold: bool = False, **kwargs: Any
) -> Report:
    """Check a program of the corpus. Small branches stay on their streams unless `fold` is set."""
    threshold = config.fold_branches_below_us if fold else 0.0
    options: dict[str, Any] | None = None
    if program.options:
        options = {**(torch._inductor.list_mode_options(mode, program.dynamic) if mode else {}), **program.options}
    with simulated_gpu(2), config.patch(fold_branches_below_us=threshold), quiet(), placement_checked():
        # A program whose oracle runs on one stream makes its streams for the compiled form only.
        is_compiled = program.frames or program.ordered
        instance = program.instance(program.compiler(mode) if is_compiled else None, sleeps)
        return check(
            instance.fn,
            *program.make_inputs("cuda", torch.Generator().manual_seed(1)),
            mode=None if options else mode,
            options=options,
            dynamic=program.dynamic,
            compile=not is_compiled,
            fullgraph=program.fullgraph,
            devices=2,
            **kwargs,
        )


def findings(report: Report) -> list[str]:
    """Return the findings of a program of the corpus: races, promises of eager that are lost, and other faults."""
    return [*(p.text for p in report.lost), *(describe(race) for race in report.races), *report.faults]


def needless(program: Program, report: Report) -> list[str]:
    """Events that a program can do without, where its compiler knows that."""
    return [] if program.name in NEEDLESS else [f"{r.site}: {r.why}" for r in report.redundant]


def forked(side: Any) -> Any:
    """A function of two matrices with work on both streams, which no program of the corpus is."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = (x @ w).relu()
        b = (x @ x).sin()
        current.wait_stream(side)
        return a @ b

    return fn


__all__ = ["cases", "check_program", "compile_program", "findings", "forked", "mode_of", "needless"]
