"""Runs a forward's wrapper and its backward's, one after the other, on the machine model of `wrapper_races`.

What was saved reaches the backward in the memory and in the state of the streams in which the forward left it; the
backward holds the last reference to it, as it does under autograd. In between, the engine writes the incoming
gradients on the ambient stream; afterwards an optimizer reads the gradients there and drops them, when a side stream
may be far ahead: a gradient in its memory must be known to the allocator as the ambient stream's, too. The second step
takes the memory that the first one left to the pools.
"""

from __future__ import annotations

import re
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

import wrapper_races
from wrapper_races import AMBIENT, Machine


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_overlay.testing._observe import Region


def output_names(region: Region) -> list[str]:
    """The graph's outputs, by the names of their nodes."""
    match = re.fullmatch(r"return \((.*?),?\)", str(region.nodes[-1].text), re.DOTALL)
    assert match is not None, region.nodes[-1].text
    return [name.strip() for name in match[1].split(",")]


def input_names(region: Region) -> list[str]:
    return [m[1] for n in region.nodes if (m := re.match(r"(\w+)(?:: [^=]*)?$", n.text)) and "return" not in n.text]


def saved_names(forward: Region, backward: Region) -> list[str]:
    """What the backward takes from its forward and the forward computed, by node names."""
    inputs = set(input_names(forward))
    return [name for name in input_names(backward) if "tangents" not in name and name not in inputs]


def _backward_args(machine: Machine, scope: dict[str, Any], backward: Region, values: dict[str, Any]) -> list[Any]:
    args = []
    for name, made in zip(input_names(backward), wrapper_races._make_args(machine, scope), strict=True):
        args.append(made if "tangents" in name else values[name])
    return args


def _freed_early(machine: Machine, gradients: list[Any]) -> Iterator[str]:
    for index, value in enumerate(gradients):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            block = machine.block(value)
            if block.pool != AMBIENT and id(block) not in machine.kept:
                yield f"gradient {index} is memory of {block.pool}, which may have it back while the optimizer reads it"


def check_step(forward: Region, backward: Region, steps: int = 2) -> list[str]:
    """The races of some steps; inside of `simulated_gpu()`."""
    machine = Machine()
    assert forward.wrapper is not None and backward.wrapper is not None

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        machine.record_stream(tensor, stream)

    with mock.patch.object(torch.Tensor, "record_stream", record_stream), machine:
        run_forward = wrapper_races.load(machine, forward.wrapper, False)
        run_backward = wrapper_races.load(machine, backward.wrapper, False)
        for _ in range(steps):
            args = wrapper_races._make_args(machine, run_forward)
            held = list(args)
            outputs = run_forward["call"](args)
            values = dict(zip(output_names(forward), outputs, strict=True))
            args = _backward_args(machine, run_backward, backward, values)
            del outputs, values
            gradients = run_backward["call"](args)
            del args
            machine.races.update(dict.fromkeys(wrapper_races._unjoined(machine, gradients)))
            read = [g for g in gradients if isinstance(g, torch.Tensor) and g.is_cuda]
            machine.launch("the optimizer", AMBIENT, read, [])
            machine.races.update(dict.fromkeys(_freed_early(machine, gradients)))
            del gradients, read, held
    return list(machine.races)
