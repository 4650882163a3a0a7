"""Simulate a device: run no kernel, and write a trace of all that eager and compiled code do to the device.

    with simulated_gpu() as gpu, SimulatedDevice(gpu) as device:
        fn(x)
    findings = analyse(device.trace.operations)

Inside `simulated_gpu()` tensors are fake, and streams and events are names. `SimulatedDevice` listens to their
operations. The reads and writes of an operator follow from its schema (`simulated_operators`), those of a generated
kernel from its signature (`simulated_module`); a tensor is a strided range of bytes of its storage. A storage is
allocated when it first appears, on the current stream, and freed when its last reference goes away. Operations of
Dynamo and the compiler on fake tensors are no part of the program, and are left out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, TYPE_CHECKING

import torch
import torch._dynamo.compiled_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from torch_overlay.analysis.race_check.simulated_cpp import module_type
from torch_overlay.analysis.race_check.simulated_module import execute, runtime
from torch_overlay.analysis.race_check.simulated_operators import engine, SimulatedOperators
from torch_overlay.analysis.race_check.source_lines import _is_compiling, assigned_name, site, user_line
from torch_overlay.analysis.race_check.trace import (
    Access,
    accesses,
    Alloc,
    ByteSpan,
    ENGINE,
    Free,
    HOST,
    Launch,
    Memory,
    Record,
    RecordStream,
    Synchronize,
    Trace,
    View,
    Wait,
)
from torch_overlay.testing import _stub_module
from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch_overlay.analysis.race_check.trace import Operation
    from torch_overlay.testing import Simulation


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: SimulatedDevice, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return run


_BETWEEN_STREAMS = ("record", "wait")  # inside of a graph, these order nothing outside


def _reported(method: Callable[..., Operation]) -> Callable[..., None]:
    """Have `Devices` report an operation by this method, which returns the operation, if the device listens."""

    @functools.wraps(method)
    def run(self: SimulatedDevice, *args: Any) -> None:
        with self.lock:
            if self.is_listening() and not (self.graph_stream is not None and method.__name__ in _BETWEEN_STREAMS):
                self.sweep()
                self.trace.add(method(self, *args))

    return run


class SimulatedDevice:
    """A context manager that writes `trace` while it is entered. `idle` is the answer to regions that ask whether their
    streams are idle.

    With `captures`, partitions run as CUDA graphs: all operations of a partition run on the stream that launches the
    graph, and its own records and waits order nothing outside.

    All threads of the program write to one trace, in order of arrival, as if they were one thread: work that one of
    them has waited for is taken to be over for the others.
    """

    def __init__(
        self, simulation: Simulation, *, misaligned: bool = False, rewrite: Callable[[str], str] | None = None
    ) -> None:
        self.simulation, self.devices, self.mode = simulation, simulation.devices, simulation.fake_mode
        self.misaligned, self.rewrite = misaligned, rewrite
        self.trace = Trace()
        self.traces: list[Trace] = []  # of all runs, each from a `begin` on
        self.idle = False
        self.captures = False  # a partition is one launch of a CUDA graph
        self.has_partitions = False
        self.graph_stream: str | None = None
        self.checks_captures = False  # Note [A capture is whole]
        self.capture: Memory | None = None  # stands for the capture of the running partition
        self.asked_idle = False
        self.ran_backward = False
        self.in_backward = 0  # nesting depth of backwards
        self.written: set[tuple[str, str]] = set()  # names of the caller's memory, each with "forward" or "backward"
        self.taken_for_aligned: dict[str, str] = {}  # misaligned inputs -> a kernel that takes them for aligned
        # Storage of a gradient that autograd's engine adds to others -> (stream, event) of all their producers
        self.gradients: dict[int, list[tuple[str, str]]] = {}
        self.before_backward: Callable[[], None] | None = None  # the surrounding code's work before a backward
        self.modules: list[Any] = []  # of generated code, in order of compilation
        self.seen: Any = None  # what `observe` collects, for the user's lines
        self.streams: dict[tuple[int, int], str] = {}
        self.private: set[str] = set()  # streams that the program makes itself
        self.events: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.event_count = 0
        self.memories: dict[int, tuple[StorageWeakRef, Memory]] = {}
        # Storages that the program didn't allocate, with their names
        self.outside: dict[int, tuple[StorageWeakRef, str]] = {}
        self.described: dict[str, str] = {}  # captured tensor -> its description
        self.slabs: dict[int, torch.Tensor] = {}
        self.names: dict[str, int] = {}
        self.home: list[str] = []  # the stream of the code around the program, on each device
        self.lock = threading.RLock()  # several threads may run parts of the program
        self.paused = ThreadValue(False)
        self.operators = SimulatedOperators(self)
        self._stack = contextlib.ExitStack()

    # ---- listening

    def __enter__(self) -> SimulatedDevice:
        assert self.devices.listener is None and self.mode.listener is None, "one SimulatedDevice at a time"
        with contextlib.ExitStack() as stack:
            self.devices.listener = self.mode.listener = self
            stack.callback(self._stop)
            stack.enter_context(
                _stub_module.executed_by(lambda text, stub: execute(self, text, stub, module_type(text)))
            )
            stack.enter_context(runtime(self))
            stack.enter_context(engine(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Start a new trace. Streams and events keep their names."""
        self.trace, self.memories, self.names = Trace(), {}, {}
        self.traces.append(self.trace)
        self.home = [self.current(index) for index in range(self.devices.count)]

    def _stop(self) -> None:
        self.devices.listener = self.mode.listener = None

    def pause(self) -> contextlib.AbstractContextManager[Any]:
        """Leave out operations inside the context: they are no part of the program."""
        return self.paused.within(True)

    @contextlib.contextmanager
    def streams_put_back(self) -> Iterator[None]:
        """Restore the current device, and the current stream of each device, at exit."""
        index = torch._C._accelerator_getDeviceIndex()
        streams = [torch._C._accelerator_getStream(i) for i in range(self.devices.count)]
        try:
            yield
        finally:
            with self.pause():
                for stream in streams:
                    torch._C._accelerator_setStream(stream)
                torch._C._cuda_setDevice(index)

    @contextlib.contextmanager
    def partition(self) -> Iterator[None]:
        """Run a partition of generated code inside the context.

        Note [A capture is whole]
        All operations of a graph are captured between the first and the last operation of the capturing stream: other
        streams are forked from that stream and joined to it. A run without capture checks this with a made-up memory:
        the capturing stream writes it first and last, and all launches in between read it.
        """
        self.has_partitions = True
        if self.capture is not None or self.graph_stream is not None or not (self.captures or self.checks_captures):
            yield
            return
        stream = self.current()
        capture = Memory("the capture of a graph", 1, stream)
        if self.captures:
            self.graph_stream = stream
        else:
            self.capture = capture
            self.trace.launch("a capture's begin", stream, [], [capture])
        try:
            yield
            if not self.captures:
                self.sweep()
                self.trace.launch("a capture's end", stream, [], [capture])
        finally:
            self.graph_stream = self.capture = None

    def is_listening(self) -> bool:
        return not self.paused.value and not _is_compiling()

    # ---- names

    def stream_name(self, stream_id: int, device: int) -> str:
        """Name a stream by its number or its raw handle; the default streams of all devices have the same handle."""
        if (known := self.devices.of_handle(stream_id)) is not None:  # an ExternalStream of one of ours
            stream_id, device = known
        name = self.streams.get((device, stream_id))
        if name is None:
            if stream_id == 0:
                name = "default stream" if device == 0 else f"default stream of cuda:{device}"
            else:
                count = sum(1 for _, i in self.streams if i)
                name = f"stream {count + 1}" + (f" of cuda:{device}" if device else "")
            self.streams[device, stream_id] = name
        return name

    @property
    def public(self) -> tuple[str, ...]:
        """Names of the streams that the caller has."""
        return tuple(name for name in self.streams.values() if name not in self.private)

    def name(self, stream: torch.Stream) -> str:
        return self.stream_name(stream.stream_id, stream.device_index)

    def current(self, device: int | None = None) -> str:
        """Return the current stream of a device (None: of the current one)."""
        index = torch._C._accelerator_getDeviceIndex() if device is None else device
        return self.name(torch._C._accelerator_getStream(index))

    def place(self, tensor: torch.Tensor) -> str:
        """Return the stream on which an operator works on a tensor."""
        if self.graph_stream is not None and tensor.is_cuda:
            return self.graph_stream
        return self.current(tensor.device.index or 0) if tensor.is_cuda else HOST

    def event_name(self, event: Any) -> str:
        name = self.events.get(event)
        if name is None:
            name = self.events[event] = self._new_event()
        return name

    def _new_event(self) -> str:
        self.event_count += 1
        return f"event {self.event_count}"

    def record_new_event(self, stream: str, site: str) -> str:
        """Record an event that PyTorch makes by itself; return its name."""
        name = self._new_event()
        self.trace.add(Record(name, stream, site))
        return name

    # ---- streams and events: called by `Devices`

    def made(self, stream: torch.Stream) -> None:
        known = (stream.device_index, stream.stream_id) in self.streams
        if not known and self.is_listening():
            self.private.add(self.name(stream))

    @_reported
    def record(self, event: Any, stream: torch.Stream) -> Operation:
        return Record(self.event_name(event), self.name(stream), site())

    @_reported
    def wait(self, event: Any, stream: torch.Stream) -> Operation:
        return Wait(self.event_name(event), self.name(stream), site())

    @_one_at_a_time
    def engine_takes(
        self, stream: str, producers: Iterable[tuple[str, str]], gradients: Iterable[torch.Tensor | None] = ()
    ) -> None:
        """Add what autograd's engine does before it uses gradients on a stream: the stream waits for the producers'
        events, and is recorded on the gradients.
        """
        others = [event for other, event in producers if other != stream]
        for event in others:
            self.trace.add(Wait(event, stream, ENGINE))
        for gradient in gradients if others else ():
            if gradient is not None and gradient.is_cuda and (memory := self.memory(gradient)).stream != stream:
                self.trace.add(RecordStream(memory, stream, ENGINE))

    @_reported
    def synchronize_event(self, event: Any) -> Operation:
        return Synchronize(event=self.event_name(event), site=site())

    @_reported
    def synchronize_stream(self, stream: torch.Stream) -> Operation:
        return Synchronize(stream=self.name(stream), site=site())

    @_reported
    def synchronize_device(self, device: int) -> Operation:
        names = tuple(name for (index, _), name in self.streams.items() if index == device)
        return Synchronize(streams=names, site=site())

    @_reported
    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> Operation:
        return RecordStream(self.memory(tensor), self.name(stream), site())

    # ---- memory

    @_one_at_a_time
    def sweep(self) -> None:
        """Add a free for each memory whose storage went away since the last call."""
        gone = [key for key, (storage, _) in self.memories.items() if storage.expired()]
        for key in gone:
            self.trace.add(Free(self.memories.pop(key)[1], site() if gone else ""))

    def allocate(self, tensor: torch.Tensor, name: str = "", stream: str = "") -> Memory:
        """Return new memory from the pool of the current stream; with `stream`, older memory of that stream's pool."""
        self.sweep()
        storage = tensor.untyped_storage()
        label = name or assigned_name() or "memory"
        count = self.names[label] = self.names.get(label, 0) + 1
        size = int(storage.nbytes())
        memory = Memory(label if count == 1 else f"{label}#{count}", size, stream or self.place(tensor))
        self.memories[storage._cdata] = StorageWeakRef(storage), memory
        if not stream:
            self.trace.add(Alloc(memory, site()))
        return memory

    def allocate_all(self, tensors: Sequence[Any], name: str) -> None:
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                self.allocate(tensor, f"{name} {index}")

    def memory(self, tensor: torch.Tensor, name: str = "") -> Memory:
        """Return the memory of a tensor. If no allocation of it was seen, the memory is the caller's; its name is the
        same in every run.
        """
        storage = tensor.untyped_storage()
        found = self.memories.get(storage._cdata)
        if found is not None and not found[0].expired():
            return found[1]
        known = self.outside.get(storage._cdata)
        if known is None or known[0].expired():
            known = StorageWeakRef(storage), name or f"captured tensor {len(self.outside) + 1}"
            if not name and (line := user_line()):
                kind = str(tensor.dtype).removeprefix("torch.")
                self.described[known[1]] = f"{kind}{[*map(int, tensor.shape)]}, first used at {line}"
            self.outside[storage._cdata] = known
        return self.allocate(tensor, known[1], self.home[tensor.device.index or 0] if tensor.is_cuda else HOST)

    def take_slab(self, nbytes: int, device: int, strict: bool = True) -> torch.Tensor:
        """Return pinned host memory of a size; every call reuses it."""
        if nbytes not in self.slabs:
            with self.pause():
                self.slabs[nbytes] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        slab = self.slabs[nbytes]
        if slab.untyped_storage()._cdata not in self.memories:
            self.allocate(slab, "slab", HOST)
        return slab

    def captured(self) -> list[tuple[str, Memory]]:
        """Return the caller's memories that the program uses, with their names."""
        return [
            (self.outside[key][1], memory)
            for key, (storage, memory) in self.memories.items()
            if key in self.outside and not storage.expired()
        ]

    def view(self, tensor: torch.Tensor) -> View:
        item = tensor.element_size()
        strides = tuple(int(s) * item for s in tensor.stride())
        return View(
            self.memory(tensor),
            ByteSpan(int(tensor.storage_offset()) * item, tuple(map(int, tensor.shape)), strides, item),
        )

    # ---- work

    @_one_at_a_time
    def launch(
        self,
        name: str,
        stream: str,
        reads: Sequence[torch.Tensor | View],
        writes: Sequence[torch.Tensor | View],
        line: str | None = None,
    ) -> None:
        """Add a kernel, a copy or host work on tensors, or on views of their memory."""
        if self.graph_stream is not None and stream != HOST:
            stream = self.graph_stream
        found = accesses(self._views(reads), self._views(writes))
        where = site()
        if self.seen is None or where.startswith("wrapper"):  # the engine adds up gradients
            callers, part = {name for _, name in self.outside.values()}, "backward" if self.in_backward else "forward"
            self.written |= {(m, part) for a in found if a.writes and (m := a.view.memory.name) in callers}
        if self.capture is not None and stream != HOST:
            found += (Access(View(self.capture), True, False),)
        self.trace.add(Launch(name, stream, found, user_line() if line is None else line, where))

    def expect_aligned(self, tensor: torch.Tensor, kernel: str) -> None:
        """Note a kernel that is compiled for an address that is a multiple of 16. Partitions get aligned copies of the
        inputs that they write from whoever runs them.
        """
        if not self.misaligned or self.has_partitions or not tensor.is_cuda or not self.is_listening():
            return
        name = self.memory(tensor).name
        if name.startswith("input "):
            self.taken_for_aligned.setdefault(name, kernel)

    def _views(self, touched: Sequence[torch.Tensor | View]) -> list[View]:
        whole = (part for part in touched if isinstance(part, View) or part.numel())
        return [part if isinstance(part, View) else self.view(part) for part in whole]

    def dispatch(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run an operator that the program calls, and trace it; the fake mode calls this for each operator."""
        if not self.is_listening():
            return run()
        with self.lock:
            return self.operators.call(func, args, kwargs, run)


__all__ = ["SimulatedDevice"]
