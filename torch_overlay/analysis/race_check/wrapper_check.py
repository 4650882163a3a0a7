"""Check a generated module by itself for races (`check_wrapper`), from the text that `TORCH_LOGS=output_code` prints.

    print(check_wrapper(Path("output_code.py").read_text()))

The module's own `get_args` makes its inputs. The order that the caller provides is not known here, nor are eager's
promises: the check assumes that inputs are ready on the current stream, that the caller's streams and events were
recorded there before the call, and that outputs are read there after it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.ids import COPY_STREAMS
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.runtime import Region
from torch_overlay.analysis.race_check.checking import Caller, EagerOrder
from torch_overlay.analysis.race_check.context import Context
from torch_overlay.analysis.race_check.race_report import Report
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.simulated_module import CheckError, Module
from torch_overlay.testing import simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.streams.region_spec import RegionSpec


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
        reports, traces = [], []
        for idle in idle_patterns([module]):
            device.begin()
            _run(device, module, calls, owned, joined, idle)
            context = Context(None, device.current(), frozenset(), frozenset())
            reports.append(context.judge(device.trace.operations))
            traces.append(device.trace)
    races = {race.key: race for report in reports for race in report.races}
    boundary = dict.fromkeys(p for report in reports for p in report.boundary) if joined else {}
    return Report(list(races.values()), reports[0].redundant, list(boundary), traces=traces)


def idle_patterns(modules: Sequence[Module]) -> Sequence[Sequence[bool]]:
    """Return the runs to make: each lists the answers, call after call, to regions that ask if streams are idle."""
    for spec in _regions(modules):
        if spec.idle_streams is not None or any(kind == OperationKind.RECORD_BUSY for kind, *_ in spec.entry):
            return (False,), (True,), (True, False), (False, True)
    return ((False,),)


def _regions(modules: Sequence[Module]) -> list[RegionSpec]:
    found = (value for module in modules for value in module.scope.values())
    return [value.spec for value in found if isinstance(value, Region)]


def _run(device: SimulatedDevice, module: Module, calls: int, owned: bool, joined: bool, idle: Sequence[bool]) -> None:
    table = caller_objects([module])
    leave = objects.enter(*table)
    try:
        caller = Caller(device, EagerOrder(), joins=not joined)
        for number in range(calls):
            device.idle = idle[number % len(idle)]
            with device.pause(), mock.patch("torch._dynamo.testing.rand_strided", empty):
                args = module.scope["get_args"]()
            device.allocate_all(args, "input")
            caller.prepare((args, table))
            held = () if owned else tuple(args)
            outputs = module.call(args)
            del args
            caller.rely(f"call {number + 1}", held, outputs, ())
            del outputs, held
    finally:
        leave()


def empty(size: Any, stride: Any, dtype: Any = torch.float32, device: Any = "cpu", **kwargs: Any) -> torch.Tensor:
    """Make an input of a module. Host memory is pinned, so copies don't wait: the module's text doesn't say."""
    pin = torch.device(device).type == "cpu"
    return torch.empty_strided(size, stride, dtype=dtype, device=device, pin_memory=pin)


def caller_objects(modules: Sequence[Module]) -> list[Any]:
    """Make the caller's streams and events, in a list by the numbers that the regions of one frame use for them."""
    found: dict[int, Any] = {0: objects.callers_stream(0)}
    for spec in _regions(modules):
        for number in spec.streams:
            if 0 <= number < COPY_STREAMS:
                found.setdefault(number, torch.cuda.Stream())
        for index in spec.objects:
            if index not in found:
                found[index] = torch.cuda.Event()
    return [found.get(index) for index in range(max(found) + 1)]


__all__ = ["caller_objects", "check_wrapper", "empty", "idle_patterns"]
