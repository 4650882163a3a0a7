"""`simulated_gpu()`: inside it PyTorch has CUDA devices, as far as compiling goes; outside nothing has changed."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import threading
from typing import Any

import torch

from torch_overlay._dynamo import objects
from torch_overlay.testing import _attention, _fake_ops, _mocks, _native
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
        for name in _MOCKED_MODULES:  # before anything is mocked, so that all of them are mocked
            importlib.import_module(name)

        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(_native.fake_device_guard())
            enter(_native.primary_context(self.devices.has_context))
            for cls, attributes in self.devices.type_attributes().items():
                enter(_native.type_attributes(cls, attributes))
            for mock in (
                *_mocks.device_mocks(self.devices),
                *_mocks.tensor_mocks(self.fake_mode),
                *_mocks.compiler_mocks(self._record_cudagraph),
            ):
                enter(mock.patch())
            enter(_fake_ops.allocations(self.fake_mode))
            enter(_attention.attention())
            enter(_mocks.forgotten_caches())
            enter(_mocks.private_cache_dir())
            stack.callback(torch._dynamo.reset)
            torch._dynamo.reset()
            stack.callback(self.devices.rewind)
            yield

    @contextlib.contextmanager
    def _entered_by_thread(self) -> Any:
        """The part that belongs to a thread: its fake mode, its configuration and its table of stream objects."""
        table = objects.current()
        try:
            with (
                torch._inductor.config.patch(_mocks.inductor_config()),
                torch._functorch.config.patch(enable_autograd_cache=False),
                self.fake_mode,
            ):
                yield
        finally:
            objects.install(table)  # a backward leaves that of its forward, with simulated streams


_MOCKED_MODULES = (
    "torch._inductor.codecache",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.select_algorithm",
)
_lock = threading.RLock()
_active: list[Simulation] = []
_open: list[contextlib.ExitStack] = []


@atexit.register
def _leave() -> None:
    """A simulation that was entered and never left would outlive the Python functions that C++ was given."""
    while _open:
        _open.pop().close()


class simulated_gpu(contextlib.ContextDecorator):
    """Context manager and decorator: `devices` simulated H200s, on any machine, with or without a GPU.

    Inside, `device="cuda"` makes fake tensors, streams and events are recorded in `device_log`, `torch.compile` runs in
    full down to the text of the generated wrapper, and calling the compiled function returns fake tensors of the layout
    that the graph promised. No kernel is compiled or launched, and no compile cache is read or written.

    A machine with a GPU is simulated all the same, so the results do not depend on the machine. The simulation belongs
    to the process; entering it again inside gives the same simulation, and a thread that makes tensors of its own
    enters it for itself.
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
                simulation = _active[-1]
                if simulation.devices.count < self._count:
                    raise RuntimeError(
                        f"simulated_gpu({self._count}) inside a simulation of {simulation.devices.count} device(s): "
                        "ask for the devices in the outer one"
                    )
            else:
                simulation = Simulation(self._count)
                stack.enter_context(simulation._entered())
                _active.append(simulation)
                stack.callback(_active.pop)
            stack.enter_context(simulation._entered_by_thread())
            self._stacks.append(stack.pop_all())
            _open.append(self._stacks[-1])
            return simulation

    def __exit__(self, *exc: Any) -> None:
        with _lock:
            stack = self._stacks.pop()
            if stack in _open:
                _open.remove(stack)
            stack.__exit__(*exc)


def active() -> Simulation | None:
    """The simulation that the process is in, if any."""
    return _active[-1] if _active else None
