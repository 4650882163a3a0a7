"""Check a generated module by itself for races (`check_wrapper`), from the text that `TORCH_LOGS=output_code` prints.

    print(check_wrapper(Path("output_code.py").read_text()))

The module's own `get_args` makes its inputs. The order that the caller provides is not known here, nor are eager's
promises: the check assumes that inputs are ready on the current stream, that the caller's streams and events were
recorded there before the call, and that outputs are read there after it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.ids import COPY_STREAMS
from torch_overlay._inductor.streams.runtime import Region
from torch_overlay.analysis.race_check.checking import Caller, EagerOrder, idle_or_busy
from torch_overlay.analysis.race_check.context import without_eager
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.simulated_module import CheckError, Module
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.analysis.race_check.race_report import Report
    from torch_overlay.analysis.race_check.trace import Trace


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
        traces: list[Trace] = []
        idle_or_busy(device, functools.partial(_run, device, module, calls, owned, joined), traces)
        report = without_eager(device, traces)
    return report if joined else replace(report, boundary=[])


def _run(
    device: SimulatedDevice, module: Module, calls: int, owned: bool, joined: bool, idle: Sequence[bool] = (False,)
) -> Caller:
    device.begin()
    table = caller_objects([module])
    leave = objects.enter(*table)
    try:
        caller = Caller(device, EagerOrder(), joins=not joined)
        for number in range(calls):
            device.idle = idle[number % len(idle)]
            with device.pause():
                args = arguments(module)
            device.allocate_all(args, "input")
            caller.prepare((args, table))
            held = () if owned else tuple(args)
            outputs = module.call(args)
            del args
            caller.rely(f"call {number + 1}", held, outputs, ())
            del outputs, held
        return caller
    finally:
        leave()


def arguments(module: Module) -> list[Any]:
    with mock.patch("torch._dynamo.testing.rand_strided", _empty):
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
        if not isinstance(region, Region):
            continue
        for number in region.spec.streams:
            if 0 <= number < COPY_STREAMS:
                found.setdefault(number, torch.cuda.Stream())
        for index in region.spec.objects:
            if index not in found:
                found[index] = torch.cuda.Event()
    return [found.get(index) for index in range(max(found) + 1)]


__all__ = ["arguments", "caller_objects", "check_wrapper"]
