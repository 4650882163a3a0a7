"""Check generated modules by themselves for races: one (`check_wrapper`), from the text that `TORCH_LOGS=output_code`
prints, or a forward's and its backward's (`check_step`), run in turn as autograd runs them.

    print(check_wrapper(Path("output_code.py").read_text()))
    report = check_step(forward, backward)

A module's own `get_args` makes its inputs. The order that the caller provides is not known here, nor are eager's
promises: the check assumes that inputs are ready on the current stream, that the caller's streams and events were
recorded there before the call, and that outputs are read there after it.

The arguments of `check_step` are regions that `torch_overlay.testing.observe` saw. The backward gets the saved tensors
in the memory, and with the state of the streams, in which the forward left them; the backward holds the last reference
to them. In between, autograd's engine writes the incoming gradients on the current stream. Afterwards an optimizer
reads the gradients there and drops them, while a side stream may already run later work: a gradient in the side
stream's memory must be recorded on the current stream, too. The next step reuses the memory that this step freed.

Unlike `check`, these need neither the program nor its inputs, and one may change a module's text to see the effect.
"""

from __future__ import annotations

import functools
import re
import types
from dataclasses import replace
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.ids import COPY_STREAMS
from torch_overlay._inductor.streams import runtime
from torch_overlay.analysis.race_check.checking import Caller, EagerOrder, idle_or_busy, in_each_way, run_calls
from torch_overlay.analysis.race_check.race_report import without_eager
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.simulated_module import CheckError, Module
from torch_overlay.analysis.race_check.trace import ENGINE
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay.analysis.race_check.race_report import Report
    from torch_overlay.testing import Region


def check_wrapper(
    text: str, *, calls: int = 2, owned: bool = False, misaligned: bool = False, joined: bool = True, devices: int = 1
) -> Report:
    """Return the report of a generated module, called `calls` times.

    With `owned`, the module gets the last reference to its inputs, as a backward does; with `misaligned`, the inputs
    aren't aligned. Without `joined`, the caller waits for all streams before it reads the outputs.
    """
    with simulated_gpu(devices) as gpu, SimulatedDevice(gpu, misaligned=misaligned) as device:
        try:
            module = Module(device, text, 0)
            module.scope["get_args"], module.scope["call"]
        except (SyntaxError, KeyError) as error:
            raise CheckError(f"this is not the text of a generated module: {type(error).__name__}: {error}") from error

        def call(caller: Caller, args: list[Any], number: int) -> None:
            held = () if owned else tuple(args)
            caller.rely(f"call {number}", held, module.call(args), ())

        idle_or_busy(device, functools.partial(_run, device, [module], calls, call, not joined))
        report = without_eager(device)
    return report if joined else replace(report, boundary=[])


def check_step(forward: Region, backward: Region, *, steps: int = 2) -> Report:
    """Return the report of `steps` training steps with the modules of the two regions, on one device."""
    if forward.wrapper is None or backward.wrapper is None:
        raise ValueError("check_step: a region has no generated module")
    with simulated_gpu() as gpu, SimulatedDevice(gpu) as device:
        device.checks_captures = True
        modules = [Module(device, text, number) for number, text in enumerate((forward.wrapper, backward.wrapper))]

        def step(caller: Caller, args: list[Any], number: int) -> None:
            held = tuple(args)
            results = modules[0].call(args)
            saved = dict(zip(output_names(forward), results, strict=True))
            saved |= dict(zip(input_names(forward), held, strict=True))
            del results
            found = modules[1].call(_backward_inputs(device, modules[1], input_names(backward), saved))
            leaves = [types.SimpleNamespace(grad=gradient) for gradient in found]  # hold the gradients
            gradients = [(f"input {i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf.grad, torch.Tensor)]
            del found, leaves
            caller.rely(f"step {number}", held, (), gradients)

        in_each_way(device, functools.partial(_run, device, modules, steps, step, False))
        return without_eager(device)


def _run(
    device: SimulatedDevice,
    modules: Sequence[Module],
    calls: int,
    call: Callable[[Caller, list[Any], int], None],
    joins: bool,
    idle: Sequence[bool] = (False,),
) -> Caller:
    """Have a caller make the inputs of the first module, and `call` them, with the objects of one frame."""
    table = caller_objects(modules)

    def prepared(caller: Caller, number: int) -> None:
        args = arguments(modules[0])
        device.allocate_all(args, "input")
        caller.prepare((args, table))
        call(caller, args, number)

    leave = objects.enter(*table)
    try:
        return run_calls(Caller(device, EagerOrder(), joins), calls, prepared, idle)
    finally:
        leave()


def _backward_inputs(device: SimulatedDevice, module: Module, names: Sequence[str], saved: dict[str, Any]) -> list[Any]:
    """Return the inputs of a backward: those that are saved, taken out of `saved`, and new incoming gradients."""
    made = dict(zip(names, arguments(module)))
    args = [value if "tangents" in name else saved[name] for name, value in made.items()]
    tangents = [value for name, value in made.items() if "tangents" in name]
    saved.clear()
    device.allocate_all(tangents, "incoming gradient")
    with device.pause():
        on_device = [t for t in tangents if isinstance(t, torch.Tensor)]
        for stream in dict.fromkeys(device.place(t) for t in on_device):
            device.launch(ENGINE, stream, [], [t for t in on_device if device.place(t) == stream], line="")
    return args


def arguments(module: Module) -> list[Any]:
    """Return inputs of a module, whose making is no part of the program."""
    with module.device.pause(), mock.patch("torch._dynamo.testing.rand_strided", _empty):
        return module.scope["get_args"]()


def _empty(size: Any, stride: Any, dtype: Any = torch.float32, device: Any = "cpu", **kwargs: Any) -> torch.Tensor:
    """Make an input of a module. Host memory is pinned, so copies don't wait: the module's text doesn't say."""
    pin = torch.device(device).type == "cpu"
    return torch.empty_strided(size, stride, dtype=dtype, device=device, pin_memory=pin)


def caller_objects(modules: Sequence[Module]) -> list[Any]:
    """Make the caller's streams and events, in a list by the numbers that the regions of one frame use for them."""
    found: dict[int, Any] = {0: objects.callers_stream(0)}
    values = (value for module in modules for value in module.scope.values())
    for region in values:
        if not isinstance(region, runtime.Region):
            continue
        for number in region.spec.streams:
            if 0 <= number < COPY_STREAMS:
                found.setdefault(number, torch.cuda.Stream())
        for index in region.spec.objects:
            if index not in found:
                found[index] = torch.cuda.Event()
    return [found.get(index) for index in range(max(found) + 1)]


def output_names(region: Region) -> list[str]:
    """Return the node names of the graph's outputs."""
    match = re.fullmatch(r"return \((.*?),?\)", str(region.nodes[-1].text), re.DOTALL)
    assert match is not None, region.nodes[-1].text
    return [name.strip() for name in match[1].split(",")]


def input_names(region: Region) -> list[str]:
    return [m[1] for n in region.nodes if (m := re.match(r"(\w+)(?:: [^=]*)?$", n.text)) and "return" not in n.text]


__all__ = ["check_step", "check_wrapper", "input_names", "output_names"]
