"""Provides `simulated_gpu()`: inside, PyTorch has CUDA devices, as far as compiling goes; outside nothing changes."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import threading
from typing import Any
from unittest import mock

import torch

from torch_overlay._dynamo import objects
from torch_overlay.testing import _fake_ops, _mocks, _native
from torch_overlay.testing._device import DeviceLog, Devices


class Simulation:
    """The simulated machine: what `with simulated_gpu() as gpu` yields."""

    def __init__(self, devices: int) -> None:
        self.devices = Devices(devices)
        self.fake_mode = _fake_ops.SimulatedTensorMode(self.devices)
        self.cudagraphs: list[dict[str, Any]] = []

    @property
    def device_log(self) -> DeviceLog:
        return self.devices.log

    def _record_cudagraph(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.cudagraphs.append({k: v for k, v in kwargs.items() if k != "stack_traces"})
        return model

    @contextlib.contextmanager
    def _entered(self) -> Any:
        if not torch.backends.cuda.is_built():
            raise _native.UnsupportedBuild(f"simulated_gpu needs a CUDA build of PyTorch; this is {torch.__version__}")
        for name in _MOCKED_MODULES:  # before anything is mocked, so that the mocks reach all of them
            importlib.import_module(name)

        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(_native.fake_device_guard())
            enter(_native.primary_context(self.devices.has_context))
            for cls, attributes in self.devices.type_attributes().items():
                enter(_native.type_attributes(cls, attributes))
            for stand_in in (
                *_mocks.device_mocks(self.devices),
                *_mocks.tensor_mocks(self.fake_mode),
                *_mocks.compiler_mocks(self._record_cudagraph),
            ):
                enter(stand_in.patch())
            enter(_fake_ops.kernels(self.fake_mode))
            enter(_mocks.forgotten_caches())
            enter(_mocks.private_cache_dir())
            enter(self._in_new_threads())
            stack.callback(torch._dynamo.reset)
            torch._dynamo.reset()
            stack.callback(self.devices.rewind)
            yield

    @contextlib.contextmanager
    def _in_new_threads(self) -> Any:
        """Make each thread that is started inside, also a thread of a pool, enter the simulation itself."""
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def enter(thread: threading.Thread) -> None:
            with self._enter_thread():
                bootstrap(thread)

        with mock.patch.object(threading.Thread, "_bootstrap_inner", enter):
            yield

    def _enter_thread(self) -> contextlib.ExitStack:
        """Enter the part that belongs to a thread: its fake mode, its configuration and its table of stream objects.
        The returned stack leaves it, in the same thread; a stack that is dropped unused does nothing.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(objects.install, objects.current())  # a backward leaves the table of its forward installed
            stack.enter_context(torch._inductor.config.patch(_mocks.inductor_config()))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            stack.enter_context(self.fake_mode)
            return stack.pop_all()


_MOCKED_MODULES = (
    "torch._inductor.codecache",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.select_algorithm",
)
_lock = threading.RLock()
_active: list[tuple[Simulation, contextlib.ExitStack]] = []  # the simulation, and what it changed for all threads
_open: list[tuple[int, contextlib.ExitStack]] = []  # what a thread entered


def _end() -> None:
    _active.pop()[1].close()


@atexit.register
def _leave() -> None:
    """Leave a simulation that was never left: it would outlive the Python functions that C++ calls. The part of another
    thread can't be left here, and does no harm.
    """
    mine = [stack for thread, stack in _open if thread == threading.get_ident()]
    _open.clear()
    for stack in reversed(mine):
        stack.close()
    while _active:
        _end()


class simulated_gpu(contextlib.ContextDecorator):
    """Context manager and decorator: `devices` simulated H200s, on any machine, with or without a GPU.

    Inside, `device="cuda"` makes fake tensors, streams and events are recorded in `device_log`, `torch.compile` runs in
    full down to the text of the generated wrapper, and calling the compiled function returns fake tensors of the layout
    that the graph promised. No kernel is compiled or launched, and no compile cache is read or written.

    A machine with a GPU is simulated all the same, so the results do not depend on the machine. The simulation belongs
    to the process: entering it again inside gives the same simulation, and threads that are started inside are in it. A
    thread that was started before has to enter it itself.
    """

    def __init__(self, devices: int = 1) -> None:
        if not 1 <= devices <= 8:
            raise ValueError(f"simulated_gpu: devices must be 1 to 8, got {devices}")
        self._count = devices
        self._stacks: list[contextlib.ExitStack] = []

    def _recreate_cm(self) -> simulated_gpu:
        return simulated_gpu(self._count)

    def __enter__(self) -> Simulation:
        with _lock, contextlib.ExitStack() as stack:
            if _active:
                simulation = _active[-1][0]
                if simulation.devices.count < self._count:
                    raise RuntimeError(
                        f"simulated_gpu({self._count}) inside a simulation of {simulation.devices.count} device(s): "
                        "ask for the devices in the outer one"
                    )
            else:
                simulation = Simulation(self._count)
                with contextlib.ExitStack() as of_process:
                    of_process.enter_context(simulation._entered())
                    _active.append((simulation, of_process.pop_all()))
                stack.callback(_end)
            stack.enter_context(simulation._enter_thread())
            self._stacks.append(stack.pop_all())
            _open.append((threading.get_ident(), self._stacks[-1]))
            return simulation

    def __exit__(self, *exc: Any) -> None:
        with _lock:
            stack = self._stacks.pop()
            _open[:] = [entry for entry in _open if entry[1] is not stack]
            stack.__exit__(*exc)


def active() -> Simulation | None:
    """Return the simulation that the process is in, if any."""
    return _active[-1][0] if _active else None
