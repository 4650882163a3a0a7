"""The programs of `stream_programs`, checked as a test checks them: on simulated GPUs, with the promises of eager."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, TYPE_CHECKING

import torch

import form  # noqa: F401
from stream_programs import Program, PROGRAMS
from torch_overlay import config
from torch_overlay.analysis.checking import check
from torch_overlay.analysis.race_report import describe
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_overlay.analysis.race_report import Report


# Compiled autograd traces the backwards of a whole step into graphs of its own, whose inputs no forward names.
OWN_FRAMES = [p for p in PROGRAMS if not p.name.startswith("train_compiled_autograd")]


def cases(programs: Any = OWN_FRAMES) -> list[tuple[str, str]]:
    """Each program in each of its modes."""
    return [(p.name, mode or "default") for p in programs for mode in p.modes]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Graph breaks are meant here."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def check_program(
    program: Program, mode: str | None = None, *, sleeps: bool = False, fold: bool = False, **kwargs: Any
) -> Report:
    """Check a program of the corpus. Small branches stay on their streams unless `fold` is set."""
    threshold = config.fold_branches_below_us if fold else 0.0
    options: dict[str, Any] | None = None
    if program.options:
        options = {**(torch._inductor.list_mode_options(mode, program.dynamic) if mode else {}), **program.options}
    with simulated_gpu(2), config.patch(fold_branches_below_us=threshold), quiet():
        instance = program.instance(program.compiler(mode) if program.frames else None, sleeps)
        # A program whose oracle runs on one stream makes its streams for the compiled form only.
        if program.ordered and not program.frames:
            instance = program.instance(program.compiler(mode), sleeps)
        return check(
            instance.fn,
            *program.make_inputs("cuda", torch.Generator().manual_seed(1)),
            mode=None if options else mode,
            options=options,
            dynamic=program.dynamic,
            compile=not program.frames,
            fullgraph=program.fullgraph,
            devices=2,
            **kwargs,
        )


# Mutants that are right although a rule calls them wrong: what was left out is more than the plan owes.
KNOWN = {
    # `attention_pattern`: the pattern's replacement takes the entry and exit of the side stream over, so that the side
    # stream waits at the exit for a reader of its memory, which eager doesn't make it do.
    "attention_pattern": ("wait_exit ev2 stream1", "record ev2 stream0"),
}


# Programs whose compiled code keeps less than eager promises, to a side stream that the caller goes on using without a
# join of its own; results on the current stream are right. To be mended in the compiler.
LOST = {
    # A temporary of the side stream is read on the current one instead of the buffer that it was copied into, and is
    # given back at the exit.
    "running_statistics": ("stream 1 may hand on the free memory of stream 1",),
    # Under reduce-overhead a partition that holds a nested region doesn't know of the streams inside of it: there is no
    # entry and no exit for them.
    "stream_inside_nested_region": (
        *("stream 1 may read", "stream 1 may overwrite"),
        *("default stream may read the caller's work", "default stream may overwrite the caller's work"),
    ),
    # In eager a copy between devices orders the current streams of both.
    "streams_of_two_devices": ("default stream of cuda:1 may",),
    # A multiplication by the number 1 is dropped, and with it the only reader of the input on the side stream.
    "item_on_side_stream": ("stream 1 may overwrite input 0",),
}


def unexpected(name: str, report: Report) -> list[str]:
    """Findings about a program of the corpus, but for those of `LOST`."""
    known = LOST.get(name, ())
    lost = [p.text for p in report.lost if not p.text.startswith(known or ("nothing",))]
    return [*lost, *(describe(race) for race in report.races)]


def is_known(mistake: str) -> bool:
    return any(mistake.startswith(name) and site in mistake for name, sites in KNOWN.items() for site in sites)


__all__ = ["OWN_FRAMES", "cases", "check_program", "is_known", "unexpected"]
