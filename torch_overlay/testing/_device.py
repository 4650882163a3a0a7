"""Simulates devices, streams and events: answers what a program asks of them, and logs all that it does to them.

The current device and stream live where PyTorch keeps them, in the thread-local state of c10's FakeGuardImpl
(`_native.py`), so that `with stream:`, autograd and `torch.accelerator` agree without help. This module adds what that
guard lacks: stream pools, handles, events with an order, and the log. The device is one NVIDIA H200, as its driver and
Triton's driver describe it.

Stream ids are the ones a real device hands out: the n-th stream of a priority's pool is
`n << 5 | (1 - priority) << 1 | 1`, and a pool has 32 streams, so the 33rd `torch.cuda.Stream()` is the first one again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_overlay.testing import _native


if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Properties:
    """The result of `torch.cuda.get_device_properties`, as read on an H200 with driver 580."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    total_memory: int = 143155 << 20
    multi_processor_count: int = 132
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    L2_cache_size: int = 60 << 20
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    clock_rate: int = 1980000
    memory_clock_rate: int = 3201000
    memory_bus_width: int = 6144
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""


H200 = Properties()


class TritonDriver:
    """A driver with what Inductor and Triton ask for while they generate code. Nothing can be launched with it."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": H200.shared_memory_per_block_optin,
                "max_num_regs": H200.regs_per_multiprocessor,
                "multiprocessor_count": H200.multi_processor_count,
                "warpSize": H200.warp_size,
                "sm_clock_rate": H200.clock_rate,
                "mem_clock_rate": H200.memory_clock_rate,
                "mem_bus_width": H200.memory_bus_width,
            }

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * H200.major + H200.minor, H200.warp_size)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_current_stream(self, device: int) -> int:
        return torch._C._cuda_getCurrentRawStream(device)

    def get_device_interface(self) -> Any:
        return torch.cuda


class Generator:
    """A default CUDA random generator: a seed and an offset, and the 16 bytes in which PyTorch stores the two."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._seed = 0
        self._offset = 0

    def manual_seed(self, seed: int) -> Generator:
        self._seed, self._offset = seed % (1 << 64), 0
        return self

    def seed(self) -> int:
        return self.manual_seed(torch.seed()).initial_seed()

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def get_state(self) -> torch.Tensor:
        words = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        with _disable_current_modes():  # a fake tensor would forget the bytes
            return torch.tensor(list(words), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        with _disable_current_modes():
            data = bytes(state.tolist())
        self._seed, self._offset = (int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little"))


_STREAMS_PER_POOL = 32
_PRIORITIES = (0, -1, -2, -3)  # the range c10 keeps pools for; lower runs first
_CUDA = 1  # c10::DeviceType::CUDA

_stream_new = _native.native_new(torch.Stream)
_event_new = _native.native_new(torch.Event)
_cuda_event_new = _native.native_new(torch._C._CudaEventBase)
_generator_new = _native.native_new(torch.Generator)
_get_stream = torch._C._accelerator_getStream
_set_stream = torch._C._accelerator_setStream
_get_device = torch._C._accelerator_getDeviceIndex
_exchange_device = torch._C._accelerator_exchangeDevice
_enter, _exit = torch.Stream.__enter__, torch.Stream.__exit__


@dataclasses.dataclass
class _EventState:
    number: int
    timing: bool
    device: int | None = None
    recorded_at: int | None = None


class DeviceLog(list[str]):
    """A log of what the program did to simulated streams, events and devices, one line each, in order.

    `while_compiling` repeats the lines that were logged while Dynamo or a backend was at work, without switches of the
    current device: it is empty if the compiler leaves the program's streams and events alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.while_compiling: list[str] = []

    def note(self, line: str, *, of_program: bool = True) -> None:
        self.append(line)
        if of_program and torch._guards.CompileContext.try_get() is not None:
            self.while_compiling.append(line)


def _name(stream: torch.Stream) -> str:
    return f"stream {stream.stream_id}" + (f" of cuda:{stream.device_index}" if stream.device_index else "")


class Devices:
    """State of the simulated devices; its methods are what the mocks call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.log = DeviceLog()
        self.listener: Any = None  # an analysis.race_check.simulated_device.SimulatedDevice
        self._made: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._events: weakref.WeakKeyDictionary[torch.Event, _EventState] = weakref.WeakKeyDictionary()
        self._generators: weakref.WeakKeyDictionary[torch.Generator, torch.device] = weakref.WeakKeyDictionary()
        self._event_numbers = itertools.count(1)
        self._clock = itertools.count(1)

    # ---- devices

    def set_device(self, index: int) -> None:
        self.exchange_device(index)

    def exchange_device(self, index: int) -> int:
        old = _get_device()
        if index >= self.count:
            raise RuntimeError(f"simulated_gpu has {self.count} device(s), asked for cuda:{index}")
        if index >= 0 and index != old:
            self.log.note(f"set device {index}", of_program=False)
            _exchange_device(index)
        return old

    def rewind(self) -> None:
        """Reset this thread's state of the fake guard to that of a new thread."""
        for index in range(self.count):
            _set_stream(self.make_stream(torch.Stream, 0, index))
        _exchange_device(0)

    def synchronize(self, index: int | None = None) -> None:
        index = _get_device() if index is None else index
        self.log.note(f"synchronize cuda:{index}")
        if self.listener is not None:
            self.listener.synchronize_device(index)

    def has_context(self, index: int) -> bool:
        return 0 <= index < self.count

    # ---- streams

    def make_stream(self, cls: type, stream_id: int, device: int) -> torch.Stream:
        stream = _stream_new(cls, stream_id=stream_id, device_index=device, device_type=_CUDA)
        assert isinstance(stream, torch.Stream)
        if isinstance(stream, torch._C._CudaStreamBase):
            _native.write_cuda_stream(stream, stream_id, device)
        return stream

    def _from_pool(self, priority: int, device: int) -> int:
        priority = min(max(priority, _PRIORITIES[-1]), 0)
        n = self._made[device, priority] % _STREAMS_PER_POOL
        self._made[device, priority] += 1
        return n << 5 | (1 - priority) << 1 | 1

    def new_stream(self, cls: type, device: object = None, *, priority: int = 0, **kwargs: int) -> torch.Stream:
        if "stream_id" in kwargs:
            return self.make_stream(cls, kwargs["stream_id"], kwargs.get("device_index", 0))
        index = _get_device() if device is None else torch._utils._get_device_index(device, optional=True)
        if kwargs.get("stream_ptr"):
            return self.make_stream(cls, kwargs["stream_ptr"], index)
        stream = self.make_stream(cls, self._from_pool(priority, index), index)
        self.log.note(f"new {_name(stream)}")
        if self.listener is not None:
            self.listener.made(stream)
        return stream

    def handle(self, stream_id: int, device: int) -> int:
        """Return a stream's cudaStream_t: null for the default one, made up for the pool's, an external one's own."""
        return 0x51000000 + (device << 20) + (stream_id << 4) if stream_id & 1 else stream_id

    def of_handle(self, handle: int) -> tuple[int, int] | None:
        """Return the stream id and device of a handle that `handle` made up; None for any other handle."""
        if handle >> 24 != 0x51:
            return None
        return (handle & 0xFFFFF) >> 4, (handle >> 20) & 0xF

    def stream_data(self, index: int) -> tuple[int, int, int]:
        current = _get_stream(index)
        return current.stream_id, current.device_index, _CUDA

    def default_stream_data(self, index: int) -> tuple[int, int, int]:
        return 0, index, _CUDA

    def raw_stream(self, index: int) -> int:
        return self.handle(_get_stream(index).stream_id, index)

    def set_stream(self, stream: torch.Stream) -> None:
        self.log.note(f"set {_name(stream)}")
        _set_stream(stream)
        _exchange_device(stream.device_index)

    def set_stream_by_id(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.set_stream(self.make_stream(torch.Stream, stream_id, device_index))

    def enter_stream(self, stream: torch.Stream) -> torch.Stream:
        self.log.note(f"enter {_name(stream)}")
        return _enter(stream)

    def exit_stream(self, stream: torch.Stream, *exc: object) -> None:
        self.log.note(f"exit {_name(stream)}")
        _exit(stream, *exc)

    def synchronize_stream(self, stream: torch.Stream) -> None:
        self.log.note(f"synchronize {_name(stream)}")
        self._host_waits(stream)

    def query_stream(self, stream: torch.Stream) -> bool:
        self.log.note(f"query {_name(stream)}")
        self._host_waits(stream)  # the answer says that the work has ended
        return True

    def _host_waits(self, target: torch.Stream | torch.Event) -> None:
        if self.listener is None:
            return
        if isinstance(target, torch.Stream):
            self.listener.synchronize_stream(target)
        else:
            self.listener.synchronize_event(target)

    def record_event(self, stream: torch.Stream, event: torch.Event | None = None) -> torch.Event:
        event = torch.Event(device=stream.device) if event is None else event
        self.record(event, stream)
        return event

    def wait_stream(self, stream: torch.Stream, other: torch.Stream) -> None:
        self.wait(self.record_event(other), stream)

    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        self.log.note(f"record_stream on {_name(stream)}")
        if self.listener is not None:
            self.listener.record_stream(tensor, stream)

    # ---- events

    def new_event(
        self, cls: type, device: object = None, *, enable_timing: bool = False, **kwargs: bool
    ) -> torch.Event:
        device = torch.device("cuda") if device is None else device
        return self._remember(_event_new(cls, device=device, enable_timing=enable_timing, **kwargs), enable_timing)

    def new_cuda_event(self, cls: type, enable_timing: bool = False, *args: bool, **kwargs: bool) -> torch.Event:
        return self._remember(_cuda_event_new(cls, enable_timing, *args, **kwargs), enable_timing)

    def _remember(self, event: object, timing: bool) -> torch.Event:
        assert isinstance(event, torch.Event)
        self._events[event] = _EventState(next(self._event_numbers), timing)
        return event

    def _state(self, event: torch.Event) -> _EventState:
        if event not in self._events:  # made before the simulation began
            self._remember(event, True)
        return self._events[event]

    def record(self, event: torch.Event, stream: torch.Stream | None = None) -> None:
        stream = _get_stream(_get_device()) if stream is None else stream
        state = self._state(event)
        state.device, state.recorded_at = stream.device_index, next(self._clock)
        self.log.note(f"record event {state.number} on {_name(stream)}")
        if self.listener is not None:
            self.listener.record(event, stream)

    def wait(self, event: torch.Event, stream: torch.Stream | None = None) -> None:
        stream = _get_stream(_get_device()) if stream is None else stream
        self.log.note(f"{_name(stream)} waits for event {self._state(event).number}")
        if self.listener is not None:
            self.listener.wait(event, stream)

    def query_event(self, event: torch.Event) -> bool:
        self.log.note(f"query event {self._state(event).number}")
        self._host_waits(event)
        return True

    def synchronize_event(self, event: torch.Event) -> None:
        self.log.note(f"synchronize event {self._state(event).number}")
        self._host_waits(event)

    def elapsed_time(self, event: torch.Event, end: torch.Event) -> float:
        """Return milliseconds: one for every record between the two events. An event may have been recorded by compiled
        code, which does not run here, so an event that was never recorded counts as recorded last."""
        first, second = self._state(event), self._state(end)
        self.log.note(f"elapsed time from event {first.number} to event {second.number}")
        if not (first.timing and second.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        last = next(self._clock)
        return float((second.recorded_at or last) - (first.recorded_at or last))

    def event_device(self, event: torch.Event) -> torch.device | None:
        index = self._state(event).device
        return None if index is None else torch.device("cuda", index)

    # ---- generators

    def new_generator(self, cls: type, device: torch.types.Device = "cpu") -> torch.Generator:
        """Return a generator; a CUDA one is a host generator that says it is on the device, as fake tensors draw no
        numbers."""
        device = torch.device("cpu" if device is None else device)
        generator = _generator_new(cls)
        assert isinstance(generator, torch.Generator)
        if device.type == "cuda":
            index = _get_device() if device.index is None else device.index
            self._generators[generator] = torch.device("cuda", index)
        return generator

    def generator_device(self, generator: torch.Generator) -> torch.device:
        return self._generators.get(generator, torch.device("cpu"))

    # ---- attributes of the C types

    def type_attributes(self) -> dict[type, dict[str, object]]:
        """Return attributes for `_native.type_attributes`. Python classes in torch.cuda call them through super()."""

        def static(fn: Callable[..., object]) -> staticmethod:
            return staticmethod(functools.wraps(fn)(lambda *a, **k: fn(*a, **k)))

        def method(fn: Callable[..., object]) -> Callable[..., object]:
            return lambda *a, **k: fn(*a, **k)

        stream = {
            "__new__": static(self.new_stream),
            "query": method(self.query_stream),
            "synchronize": method(self.synchronize_stream),
        }
        events = {
            "record": method(self.record),
            "wait": method(self.wait),
            "query": method(self.query_event),
            "synchronize": method(self.synchronize_event),
            "elapsed_time": method(self.elapsed_time),
        }
        return {
            torch.Stream: {
                **stream,
                "__enter__": method(self.enter_stream),
                "__exit__": method(self.exit_stream),
                "record_event": method(self.record_event),
                "wait_event": lambda s, event: self.wait(event, s),
                "wait_stream": method(self.wait_stream),
                "native_handle": property(lambda s: self.handle(s.stream_id, s.device_index)),
            },
            torch._C._CudaStreamBase: {
                **stream,
                "cuda_stream": property(lambda s: self.handle(s.stream_id, s.device_index)),
                "priority": property(lambda s: 1 - (s.stream_id >> 1 & 15) if s.stream_id & 1 else 0),
                "priority_range": staticmethod(lambda: (0, _PRIORITIES[-1])),
            },
            torch.Event: {**events, "__new__": static(self.new_event)},
            torch.Generator: {"__new__": static(self.new_generator), "device": property(self.generator_device)},
            torch._C._CudaEventBase: {
                **events,
                "__new__": static(self.new_cuda_event),
                "device": property(self.event_device),
            },
        }
