"""Check a forward's and its backward's generated modules for races (`check_step`), run in turn as autograd runs them.

    report = check_step(forward, backward)

Both arguments are regions that `torch_overlay.testing.observe` saw. The backward gets the saved tensors in the
memory, and with the state of the streams, in which the forward left them; the backward holds the last reference to
them. In between, autograd's engine writes the incoming gradients on the current stream. Afterwards an optimizer reads
the gradients there and drops them, while a side stream may already run later work: a gradient in the side stream's
memory must be recorded on the current stream, too. The next step reuses the memory that this step freed.

Unlike `check`, this needs neither the program nor its inputs, and one may change the text of a module to see the
effect.
"""

from __future__ import annotations

import functools
import re
import types
from typing import TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects
from torch_overlay.analysis.race_check.checking import Caller, EagerOrder, in_each_way
from torch_overlay.analysis.race_check.context import without_eager
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.simulated_module import Module
from torch_overlay.analysis.race_check.trace import ENGINE
from torch_overlay.analysis.race_check.wrapper_check import arguments, caller_objects
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.analysis.race_check.race_report import Report
    from torch_overlay.analysis.race_check.trace import Trace
    from torch_overlay.testing._observe import Region


def output_names(region: Region) -> list[str]:
    """Return the node names of the graph's outputs."""
    match = re.fullmatch(r"return \((.*?),?\)", str(region.nodes[-1].text), re.DOTALL)
    assert match is not None, region.nodes[-1].text
    return [name.strip() for name in match[1].split(",")]


def input_names(region: Region) -> list[str]:
    return [m[1] for n in region.nodes if (m := re.match(r"(\w+)(?:: [^=]*)?$", n.text)) and "return" not in n.text]


def saved_names(forward: Region, backward: Region) -> list[str]:
    """Return the node names of the backward's inputs that the forward computed."""
    inputs = set(input_names(forward))
    return [name for name in input_names(backward) if "tangents" not in name and name not in inputs]


def check_step(forward: Region, backward: Region, *, steps: int = 2) -> Report:
    """Return the report of `steps` training steps with the modules of the two regions, on one device."""
    if forward.wrapper is None or backward.wrapper is None:
        raise ValueError("check_step: a region has no generated module")
    with simulated_gpu() as gpu, SimulatedDevice(gpu) as device:
        device.checks_captures = True
        modules = [Module(device, text, number) for number, text in enumerate((forward.wrapper, backward.wrapper))]
        traces: list[Trace] = []
        in_each_way(device, functools.partial(_run, device, modules, (forward, backward), steps), traces)
        return without_eager(device, traces)


def _run(
    device: SimulatedDevice,
    modules: Sequence[Module],
    regions: tuple[Region, Region],
    steps: int,
    idle: Sequence[bool] = (False,),
) -> Caller:
    device.begin()
    forward, backward = regions
    table = caller_objects(modules)
    leave = objects.enter(*table)
    try:
        caller = Caller(device, EagerOrder())
        for number in range(steps):
            device.idle = idle[number % len(idle)]
            with device.pause():
                args = arguments(modules[0])
            device.allocate_all(args, "input")
            caller.prepare((args, table))
            held = tuple(args)
            results = modules[0].call(args)
            saved = dict(zip(output_names(forward), results, strict=True))
            saved |= dict(zip(input_names(forward), held, strict=True))
            with device.pause():
                made = arguments(modules[1])
            args = [value if "tangents" in name else saved[name] for name, value in zip(input_names(backward), made)]
            tangents = [value for name, value in zip(input_names(backward), made) if "tangents" in name]
            device.allocate_all(tangents, "incoming gradient")
            with device.pause():
                on_device = [t for t in tangents if isinstance(t, torch.Tensor)]
                for stream in dict.fromkeys(device.place(t) for t in on_device):
                    device.launch(ENGINE, stream, [], [t for t in on_device if device.place(t) == stream], line="")
            del results, saved, made, tangents, on_device
            found = modules[1].call(args)
            leaves = [types.SimpleNamespace(grad=gradient) for gradient in found]  # hold the gradients
            gradients = [(f"input {i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf.grad, torch.Tensor)]
            del args, found, leaves
            caller.rely(f"step {number + 1}", held, (), gradients)
            del held, gradients
        return caller
    finally:
        leave()


__all__ = ["check_step", "input_names", "output_names", "saved_names"]
