"""Run a function for its timeline: on a simulated device, or on a GPU under the profiler."""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay.analysis.timelines.clock import schedule, TimedDevice
from torch_overlay.analysis.timelines.lines import saved_tensors
from torch_overlay.analysis.timelines.timeline import Timeline
from torch_overlay.testing import observe, simulated_gpu
from torch_overlay.testing._observe import as_compiled, as_simulated, run_backward
from torch_overlay.testing._simulate import active


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay.testing import Compiled, Simulation

WARM_UP = 4  # calls on a GPU before the profiler starts; the second call captures a CUDA graph


def timeline(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 1,
    backward: bool = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    fullgraph: bool = False,
    compile: bool = True,
    simulate: bool | None = None,
    devices: int = 1,
    title: str = "",
) -> Timeline:
    """Compile `fn`, and return the timeline of `calls` calls of it after the first ones, which compile it.

    `backward` runs the backward of the outputs after each call. A function that is compiled already runs as it is, and
    so does, with `compile=False`, one that calls compiled functions. With `simulate` None, the device is simulated if
    there is no GPU, or inside `torch_overlay.testing.simulated_gpu()`, where tensors and streams must then be made;
    `devices` is the number of simulated devices. Times of a simulated run are estimates: Note [Times of a simulated
    run].
    """
    if calls < 1:
        raise ValueError(f"timeline: calls must be at least 1, got {calls}")
    if simulate is None:
        simulate = active() is not None or not torch.cuda.is_available()
    title = title or getattr(fn, "__name__", type(fn).__name__)
    if compile:
        fn = as_compiled(fn, mode=mode, dynamic=dynamic, options=options, fullgraph=fullgraph)
    if not simulate:
        with observe() as seen:
            for _ in range(WARM_UP):
                step(fn, args, backward)
            torch.cuda.synchronize()
        with profiler() as profile:
            for _ in range(calls):
                step(fn, args, backward)
        return Timeline.from_profile(profile, seen=seen, title=title)
    with simulated_gpu(devices) as gpu, observe() as seen:
        given = as_simulated(gpu, args)
        torch._dynamo.reset()  # earlier compiled code has no module on this device
        with TimedDevice(gpu) as device:
            device.seen = seen
            device.begin()
            step(fn, given, backward)
            device.begin()
            kept = None
            for _ in range(calls):
                kept = step(fn, given, backward)
            found = of_device(device, title)
            del kept
            return found


@contextlib.contextmanager
def watching(simulation: Simulation | None, seen: Compiled, title: str) -> Iterator[Callable[[], Timeline]]:
    """Watch what runs inside the context, from the first compiled call on; yield a function that returns its timeline,
    to be called afterwards. `seen` is the value that `observe()` yielded around the context.
    """
    if simulation is None:
        with profiler() as profile:
            yield lambda: Timeline.from_profile(profile, seen=seen, title=title)
        return
    device = TimedDevice(simulation)
    device.seen, seen.at_first = seen, device.begin
    with device:
        device.begin()
        yield lambda: of_device(device, title)


def of_device(device: TimedDevice, title: str) -> Timeline:
    """Return the timeline of all that a device has seen since its last `begin`."""
    device.sweep()
    devices = {name: index for (index, _), name in device.streams.items()}
    operations = device.trace.operations
    saved = saved_tensors(operations, device.seen.offloads if device.seen is not None else ())
    return schedule(operations, device.costs, title=title, devices=devices, saved=saved)


def step(fn: Callable[..., Any], args: Sequence[Any], backward: bool) -> Any:
    """Run one call. A backward makes new gradients; it adds none to those of the previous call."""
    if backward:
        parameters = fn.parameters() if isinstance(fn, torch.nn.Module) else ()
        for tensor in (*pytree.tree_leaves(args), *parameters):
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
                tensor.grad = None
    outputs = fn(*args)
    if backward:
        run_backward(outputs)
    return outputs


@contextlib.contextmanager
def profiler() -> Iterator[Any]:
    """Run `torch.profiler.profile` with all that a timeline shows: kernels, events between streams, memory."""
    from torch.profiler import _ExperimentalConfig, profile, ProfilerActivity

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        profile_memory=True,
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
    ) as found:
        yield found
        torch.cuda.synchronize()


__all__ = ["profiler", "timeline", "watching"]
