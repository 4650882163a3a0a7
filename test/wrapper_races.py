"""Runs a generated wrapper on a machine model, and reports every unordered access that it makes.

The wrapper's text is executed as it is, inside `simulated_gpu()`: allocations, extern kernels and operators run on
fake tensors, Triton and C++ kernels are stand-ins that know which arguments they write. The model keeps a vector
clock for each stream and for the host, joined by records, waits and host synchronisation, and a caching allocator:
memory whose last reference goes away returns to the pool of the stream that was current when it was allocated, and
the next allocation there takes it. Two accesses of one piece of memory, one of them writing, that no chain of events
orders are a race.

    races = check(wrapper_text)

`check` calls the wrapper twice, as a loop does; the memory that the first call leaves to the pools serves the second.
Inputs are written by the ambient stream before each call. It reports as well each output that the ambient stream
isn't ordered behind at the end; programs that leave joins to the caller say so (`joined=False`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, TYPE_CHECKING
from unittest import mock

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


HOST = "host"
AMBIENT = "ambient0"


Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides


class Clock(dict[str, int]):
    def join(self, other: Clock) -> None:
        for stream, position in other.items():
            self[stream] = max(self.get(stream, 0), position)

    def covers(self, stream: str, position: int) -> bool:
        return self.get(stream, 0) >= position


@dataclasses.dataclass
class Access:
    what: str
    stream: str
    position: int
    writes: bool
    layout: Layout | None  # None: all of the block


@dataclasses.dataclass(eq=False)
class Block:
    """Memory of the allocator, through all tensors that live in it one after the other."""

    pool: str
    size: int
    accesses: list[Access] = dataclasses.field(default_factory=list)


class Handle:
    """A stream or an event of the wrapper: how it is used tells which."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.recorded: Clock | None = None

    @property
    def cuda_stream(self) -> Handle:
        return self

    device_index = 0

    def record(self, stream: Handle) -> None:
        self.recorded = Clock(self.machine.clock(stream.name))

    def _state(self) -> Clock:
        # An event that the wrapper didn't record is the caller's, who recorded it on the ambient stream.
        return self.machine.entry if self.recorded is None else self.recorded

    def wait(self, stream: Handle) -> None:
        self.machine.clock(stream.name).join(self._state())

    def wait_entry(self, stream: Handle) -> None:
        self.wait(stream)

    def wait_stream(self, other: Handle) -> None:
        self.machine.clock(self.name).join(self.machine.clock(other.name))

    def wait_event(self, event: Handle) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        is_stream = self.name in self.machine.clocks
        self.machine.clock(HOST).join(self.machine.clock(self.name) if is_stream else self._state())


class Machine(TorchDispatchMode):
    """Streams, events, memory, and the accesses to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_idle = False  # what a region that asks is told
        self.clocks: dict[str, Clock] = {}
        self.objects: dict[str, Handle] = {}
        self.current: dict[int, str] = {}
        self.blocks: dict[int, tuple[StorageWeakRef, Block]] = {}
        self.free: list[Block] = []
        self.kept: set[int] = set()
        self.entry = Clock()
        self.races: dict[str, None] = {}
        self.slabs: dict[int, torch.Tensor] = {}

    # ---- streams

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, Clock())

    def object(self, name: str) -> Handle:
        return self.objects.setdefault(name, Handle(self, name))

    def current_stream(self, device: int = 0) -> str:
        return self.current.get(device, f"ambient{device}")

    def set_stream(self, stream: Handle) -> None:
        device = int(stream.name[7:]) if stream.name.startswith("ambient") else torch.cuda.current_device()
        self.current[device] = stream.name

    # ---- memory

    def sweep(self) -> None:
        for key, (storage, block) in list(self.blocks.items()):
            if storage.expired():
                del self.blocks[key]
                if id(block) not in self.kept:
                    self.free.append(block)

    def allocate(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cuda:
            pool, size = HOST, 0
        else:
            pool, size = self.current_stream(tensor.device.index or 0), tensor.untyped_storage().nbytes()
        self.sweep()
        block = next((b for b in reversed(self.free) if b.pool == pool and b.size == size and size), None)
        if block is None:
            block = Block(pool, size)
        else:
            self.free.remove(block)
            for access in block.accesses:
                access.layout = None
        storage = tensor.untyped_storage()
        self.blocks[storage._cdata] = StorageWeakRef(storage), block

    def block(self, tensor: torch.Tensor) -> Block:
        found = self.blocks.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired():
            self.allocate(tensor)
            found = self.blocks[tensor.untyped_storage()._cdata]
        return found[1]

    def take_slab(self, nbytes: int, device: int, strict: bool) -> torch.Tensor:
        """Host memory for saved activations: the same at every call, as when one forward is alive at a time."""
        if nbytes not in self.slabs:
            self.slabs[nbytes] = torch.empty(nbytes, dtype=torch.uint8)
        return self.slabs[nbytes]

    def record_stream(self, tensor: torch.Tensor, stream: Handle) -> None:
        self.kept.add(id(self.block(tensor)))

    # ---- work

    def launch(self, what: str, stream: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        clock = self.clock(stream)
        clock.join(self.clock(HOST))
        position = clock.get(stream, 0) + 1
        clock[stream] = position
        for tensor, is_write in [*((t, False) for t in reads), *((t, True) for t in writes)]:
            if not tensor.numel():
                continue
            block = self.block(tensor)
            access = Access(what, stream, position, is_write, _layout(tensor))
            for earlier in block.accesses:
                if not (is_write or earlier.writes) or clock.covers(earlier.stream, earlier.position):
                    continue
                if _overlap(earlier.layout, access.layout):
                    self.report(earlier, access)
            block.accesses.append(access)

    def report(self, first: Access, second: Access) -> None:
        def text(access: Access) -> str:
            return f"{access.what} {'writes' if access.writes else 'reads'} on {access.stream}"

        self.races[f"{text(first)} | {text(second)}"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("streams.synchronize_device"):
            for clock in list(self.clocks.values()):
                self.clock(HOST).join(clock)
            return None
        if func is torch.ops.aten._local_scalar_dense.default:
            self.launch(name, self.place(args[0]), [args[0]], [])
            self.clock(HOST).join(self.clock(self.place(args[0])))
            return 1
        out = func(*args, **kwargs)
        schema = func._schema
        reads, writes, aliases = [], [], False
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
            aliases |= bool(tensors and argument.alias_info and not argument.alias_info.is_write)
            (writes if argument.alias_info and argument.alias_info.is_write else reads).extend(tensors)
        if aliases and not writes:
            return out
        results = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        results = [t for t in results if t.untyped_storage()._cdata not in known]
        for tensor in results:
            self.allocate(tensor)
        if "empty" in name or func.namespace == "prim":
            return out
        touched = [*reads, *writes, *results]
        device = next((t for t in touched if t.is_cuda), touched[0] if touched else None)
        if device is None:
            return out
        stream = self.place(device)
        self.launch(name, stream, reads, [*writes, *results])
        crosses = device.is_cuda and any(not t.is_cuda and t.dim() for t in touched)
        if crosses and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True)):
            self.clock(HOST).join(self.clock(stream))
        return out

    def place(self, tensor: torch.Tensor) -> str:
        return self.current_stream(tensor.device.index or 0) if tensor.is_cuda else HOST

    # ---- stand-ins of the wrapper's names

    def kernel(self, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        match = re.search(r"def \w+\(([^)]*)\)", source)
        assert match is not None
        names = [p.split(":")[0].strip() for p in match[1].split(",")]
        mutated = set(re.findall(r"'(\w+)'", (re.search(r"'mutated_arg_names': \[([^]]*)\]", source) or ["", ""])[1]))
        stored = set(re.findall(r"tl\.(?:store|atomic_\w+)\((\w+)", source))

        class Kernel:
            @staticmethod
            def run(*values: Any, stream: Handle) -> None:
                reads, writes = [], []
                for parameter, value in zip(names, values):
                    if isinstance(value, torch.Tensor):
                        written = parameter in mutated or parameter in stored or "out_ptr" in parameter
                        (writes if written else reads).append(value)
                        if written and parameter.startswith("in_out"):
                            reads.append(value)
                self.launch(name, stream.name, reads, writes)

        return Kernel

    def cpp(self, types: list[str], source: str, *args: Any, **kwargs: Any) -> Callable[..., None]:
        def run(*values: Any) -> None:
            tensors = [(t, v) for t, v in zip(types, values) if isinstance(v, torch.Tensor)]
            reads = [v for t, v in tensors if "const" in t]
            self.launch("cpp kernel", HOST, reads, [v for t, v in tensors if "const" not in t])

        return run

    def region(self, device: int | None, streams: dict[str, int | str], events: int = 0, **fields: Any) -> Region:
        return Region(self, streams, events, fields)


class Region:
    """The region of a wrapper, on the machine's streams."""

    def __init__(self, machine: Machine, streams: dict[str, int | str], events: int, fields: dict[str, Any]) -> None:
        self.machine, self.streams, self.count, self.fields = machine, streams, events, fields

    def find(self, name: str) -> Handle:
        where = self.streams.get(name)
        if isinstance(where, str):
            return self.machine.object(self.machine.current_stream(int(where[5:])))
        return self.machine.object(f"object{self.fields['objects'][name] if where is None else where}")

    def enter(self) -> tuple[Any, ...]:
        return (frame := Frame(self)), *map(frame.result, self.fields.get("returns", ()))


class Frame:
    def __init__(self, region: Region) -> None:
        self.region = region
        self.events = [Handle(region.machine, "event of a region") for _ in range(region.count)]
        self.streams = {name: region.find(name) for name in region.streams}
        self.caller = next(iter(self.streams.values()))
        self.spread = "follows" not in region.fields or not region.machine.is_idle
        if self.spread:
            self.run("entry")
        else:  # the host was told that these streams hold nothing
            for stream in (self.caller, *self.followers()):
                region.machine.clock(HOST).join(region.machine.clock(stream.name))

    def followers(self) -> list[Handle]:
        return [self.streams[name] for name in self.region.fields["follows"]]

    def result(self, name: str) -> Any:
        if name.startswith("spread"):
            return self.spread
        return self.named(name) if self.spread or not name.endswith("_raw") else self.caller

    def named(self, name: str) -> Handle:
        if name.startswith("ev") and name[2].isdigit():
            return self.events[int(name[2:].partition("_")[0])]
        plain = name.removesuffix("_raw")
        return self.streams[plain] if plain in self.streams else self.region.find(name)

    def run(self, boundary: str) -> None:
        for kind, event, stream in self.region.fields.get(boundary, ()):
            getattr(self.named(event), kind.partition("_")[0])(self.streams[stream])

    def leave(self) -> None:
        if self.spread:
            self.run("exit")
        else:
            for stream in self.followers():
                self.region.machine.clock(stream.name).join(self.region.machine.clock(self.caller.name))


def _layout(tensor: torch.Tensor) -> Layout:
    return int(tensor.storage_offset()), tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))


def _overlap(first: Layout | None, second: Layout | None) -> bool:
    if first is None or second is None or first == second:
        return True
    return not _elements(first).isdisjoint(_elements(second))


@functools.lru_cache(maxsize=64)
def _elements(layout: Layout) -> frozenset[int]:
    offset, sizes, strides = layout
    found = numpy.full((), offset, dtype=numpy.int64)
    for size, stride in zip(sizes, strides):
        found = numpy.add.outer(found, numpy.arange(size) * stride)
    return frozenset(found.ravel().tolist())


class _Compile:
    def __init__(self, machine: Machine) -> None:
        self.triton, self.cpp_pybinding = machine.kernel, machine.cpp

    def wait(self, scope: Any) -> None:
        pass


def _strided(device: str, pinned: bool = False) -> Callable[..., torch.Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device, pin_memory=pinned)


def load(machine: Machine, text: str, misaligned: bool) -> dict[str, Any]:
    """The wrapper as a module of the machine."""
    scope: dict[str, Any] = {"_simulated": _Compile(machine), "__name__": "wrapper"}
    from torch_overlay._inductor import stream_runtime

    with mock.patch.object(stream_runtime, "region", machine.region):
        exec(text.replace("async_compile = AsyncCompile()", "async_compile = _simulated"), scope)

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    scope.update(
        empty_strided_cuda=_strided("cuda"),
        empty_strided_cpu=_strided("cpu"),
        empty_strided_cpu_pinned=_strided("cpu", True),
        reinterpret_tensor=lambda t, size, stride, offset=0: t.as_strided(size, stride, t.storage_offset() + offset),
        copy_if_misaligned=(lambda t: t.clone()) if misaligned else (lambda t: t),
        get_object=lambda index: machine.object(f"object{index}"),
        get_raw_stream=lambda device: machine.object(machine.current_stream(device)),
        set_stream=machine.set_stream,
        restore_stream=machine.set_stream,
        assert_size_stride=ignore,
        assert_size_stride_grouped=ignore,
        assert_alignment=ignore,
        assert_tensor_metadata=ignore,
        take_slab=machine.take_slab,
        note_use=ignore,
    )
    return scope


def _make_args(machine: Machine, scope: dict[str, Any]) -> list[Any]:
    def rand_strided(size: Any, stride: Any, dtype: Any = torch.float32, device: Any = "cpu", **kwargs: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    with mock.patch("torch._dynamo.testing.rand_strided", rand_strided):
        args = scope["get_args"]()
    for value in args:
        if isinstance(value, torch.Tensor) and value.numel():
            machine.launch("the caller", machine.place(value), [], [value])
    for device in range(torch.cuda.device_count()):
        machine.entry.join(machine.clock(f"ambient{device}"))
    return args


def _unjoined(machine: Machine, outputs: Any) -> Iterator[str]:
    for index, value in enumerate(outputs):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            reader = Clock(machine.clock(f"ambient{value.device.index or 0}"))
            reader.join(machine.clock(HOST))
            for access in machine.block(value).accesses:
                if access.writes and not reader.covers(access.stream, access.position):
                    yield f"output {index} is written by {access.what} on {access.stream}, and nothing joins that"


def check(text: str, joined: bool = True, owned: bool = False, misaligned: bool = False, calls: int = 2) -> list[str]:
    """The races of a wrapper; `owned` says that the caller keeps no reference to the inputs. A wrapper that asks
    whether its streams are idle is told so in all, in none, and in every second of its calls.
    """
    found: dict[str, None] = {}
    answers = [(False, False)]
    if "follows=" in text:
        answers += [(True, True), (True, False), (False, True)]
    for idle in answers:
        found.update(_run(text, joined, owned, misaligned, [idle[call % 2] for call in range(calls)]))
    return list(found)


def _run(text: str, joined: bool, owned: bool, misaligned: bool, idle: list[bool]) -> dict[str, None]:
    machine = Machine()

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        machine.record_stream(tensor, stream)

    with mock.patch.object(torch.Tensor, "record_stream", record_stream), machine:
        scope = load(machine, text, misaligned)
        for machine.is_idle in idle:
            args = _make_args(machine, scope)
            held = None if owned else list(args)
            outputs = scope["call"](args)
            if joined:
                machine.races.update(dict.fromkeys(_unjoined(machine, outputs)))
            else:
                for clock in list(machine.clocks.values()):
                    machine.clock(AMBIENT).join(clock)
            del args, held, outputs
    return machine.races
