"""A device for the tests of `Runner` that needs no GPU: "captures" are recorded operators on memory of the host.

A recording has an arena of its own, in which inputs, outputs and results of operators get addresses. Each operator is a
node, and the addresses of its tensors are the node's parameters, so the real proof decides which region every one of
them belongs to. A launcher rebuilds the tensors at the patched addresses and runs the operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import mmap
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes, TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from stand_ins import relaunch_driver
from torch_overlay._inductor.relaunch import compiled_region, governor
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.governor import Governor
from torch_overlay._inductor.relaunch.graph.concurrency import relaxed
from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.launch import executable, relaunch
from torch_overlay._inductor.relaunch.numbers.expressions import pack
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, Conditional, KernelNode, Unprovable
from torch_overlay._inductor.relaunch.proof.prove import prove
from torch_overlay._inductor.relaunch.steps import Steps


ARENA = 1 << 20
CPU = torch.device("cpu")
STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def tensor_at(address: int, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride))
    storage = torch._C._construct_storage_from_data_pointer(address, CPU, extent * dtype.itemsize)
    with _disable_current_modes():
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))


class Slot:
    """Stands for a tensor among an operator's arguments."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.like = tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype


class StorageSlot:
    """Stands for a storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.like = (storage.nbytes(),)


def storage_at(address: int, nbytes: int) -> torch.UntypedStorage:
    return torch._C._construct_storage_from_data_pointer(address, CPU, nbytes)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_region(value: Any) -> bool:
    """On the fake device all tensors are its own but those that a test marks."""
    return is_tensor(value) and not getattr(value, "on_host", False)


class Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flat, spec = tree_flatten(result)
        leaves = tree_flatten((args, kwargs))[0]
        given = {t.untyped_storage().data_ptr() for t in leaves if is_tensor(t)}
        given |= {s.data_ptr() for s in leaves if isinstance(s, STORAGES)}
        placed = []
        for tensor in flat:
            if is_tensor(tensor) and tensor.numel() and tensor.untyped_storage().data_ptr() not in given:
                fresh = self.recording.allocate(tensor.size(), tensor.stride(), tensor.dtype)
                placed.append(fresh.copy_(tensor))
            else:
                placed.append(tensor)
        if func is torch.ops.aten.empty_strided.default or func.is_view:
            return tree_unflatten(placed, spec)
        self.recording.note(func, (args, kwargs), placed)
        return tree_unflatten(placed, spec)


class Number:
    """Stands for a number among a kernel's arguments."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def read(self, word: int) -> Any:
        value = word.to_bytes(8, "little")
        return struct.unpack("<d", value)[0] if self.letter == "d" else int.from_bytes(value, "little", signed=True)


class Kernel:
    """A kernel that generated code launches as it does Triton's: `function` gets tensors and numbers. `letters` has the
    types of its parameters; `grid` is an expression of its parameters, whose names are `names`."""

    def __init__(self, device: FakeDevice, function: Any, names: str, letters: str, grid: str = "1") -> None:
        self.device, self.function, self.arg_tys = device, function, letters
        scope: dict[str, Any] = {"runner": self.launch}
        text = f"def launcher({names}, stream):\n    runner({grid}, 1, 1, stream, {names})"
        exec(text, scope)
        scope["launcher"]._is_static = True
        self.launchers = [scope["launcher"]]

    def run(self, *args: Any, stream: Any) -> None:
        self.launchers[0](*args, stream=stream)

    def launch(self, x: int, y: int, z: int, stream: Any, *args: Any) -> None:
        assert all(type(v) is int for v in (x, y, z))
        recording = getattr(self.device.thread, "recording", None)
        if recording is None:
            return self._run(*args)
        words = [
            a.data_ptr() if is_tensor(a) else int.from_bytes(pack(letter, a), "little")
            for a, letter in zip(args, self.arg_tys, strict=True)
        ]
        arguments = [Slot(a) if is_tensor(a) else Number(letter) for a, letter in zip(args, self.arg_tys, strict=True)]
        flat, spec = tree_flatten((tuple(arguments), {}))
        recording.operations.append((self._run, spec, flat, [None], words))

    def _run(self, *args: Any) -> None:
        self.function(*args)


def set_condition(predicate: torch.Tensor) -> list[Any]:
    """Stands for the kernel that reads a predicate; `Executable` takes the branch."""
    assert predicate.dtype == torch.bool and predicate.numel() == 1
    return []


class Recording:
    written = False  # a test sets it, in place of a kernel that is launched outside of the capture

    def __init__(self, device: FakeDevice, gap: int) -> None:
        self.owner, self.device = device, CPU
        # Where a device's memory could be: the heap of some Pythons lies below 4 GiB.
        self.arena = torch.frombuffer(mmap.mmap(-1, ARENA), dtype=torch.uint8)
        self.low = self.arena.data_ptr()
        self.high = self.low + ARENA
        self.next = -(-self.low // 4096) * 4096 + 256 * gap
        self.gap = 256 * gap
        self.taken: list[tuple[int, int]] = []
        self.fixed: list[int] = []
        self.conditionals: list[Conditional] = []
        self.operations: list[Any] = []
        self.closed = False
        device.open += 1

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def take(self, size: int, skew: int = 0) -> int:
        address = self.next + skew
        self.next = -(-(address + size + self.gap) // 256) * 256
        assert self.next < self.high
        self.taken.append((address, size))
        return address

    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        if 0 in size:  # as the caching allocator has it: at no address
            return torch.empty_strided(size, stride, dtype=dtype)
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride))
        return tensor_at(self.take(extent * dtype.itemsize), size, stride, dtype)

    def place(self, view: Any, alignment: int = 256) -> torch.Tensor:
        if not view.extent:
            return torch.empty_strided(view.size, view.stride, dtype=view.dtype)
        address = self.take(view.extent, alignment if alignment < 256 else 0)
        return tensor_at(address, view.size, view.stride, view.dtype)

    def fill(self) -> None:
        self.written = False

    def is_written(self) -> bool:
        return self.written

    def covers(self, address: int) -> bool:
        return self.low <= address < self.high

    def nodes(self) -> list[int]:
        return list(range(len(self.operations)))

    def segments(self) -> list[tuple[int, int]]:
        return list(self.taken)

    def allocations_made(self) -> int:
        return len(self.taken)

    def allocations(self, first: int) -> list[tuple[int, int]]:
        return self.taken[first:]

    def apart(self, call: Any, asked: Any) -> Any:
        before, result = len(self.taken), call()
        segments = dict(self.taken[before:])
        made = len(segments), sum(segments.values())
        return result, segments, made if asked is None else asked

    def pool(self) -> Any:
        return object()

    def within(self, pool: Any) -> Any:
        return contextlib.nullcontext()

    def noting_lines(self, namespace: Any) -> Any:
        return contextlib.nullcontext()

    def clear_stack(self) -> None:
        pass  # operations here know their arguments, and nothing else

    def kept(self) -> list[int]:
        return self.owner.kept

    @contextlib.contextmanager
    def capturing(self, inputs: Any, random: bool) -> Any:
        self.owner.random.append(random)
        if self.owner.fail_captures:
            self.owner.fail_captures -= 1
            raise RuntimeError("the driver has the flu")
        self.owner.thread.recording = self
        try:
            with Recorder(self):
                yield
        finally:
            self.owner.thread.recording = None

    def read_predicate(self, predicate: torch.Tensor) -> None:
        self.note(set_condition, ((predicate,), {}), [])

    def note(self, func: Any, given: Any, placed: list[Any]) -> None:
        flat, spec = tree_flatten(given)
        addresses = [t.data_ptr() for t in flat if (is_tensor(t) and t.numel()) or isinstance(t, STORAGES)]
        addresses += [t.data_ptr() for t in placed if is_tensor(t) and t.numel()]
        arguments = [StorageSlot(a) if isinstance(a, STORAGES) else a for a in flat]
        arguments = [Slot(a) if is_tensor(a) and a.numel() else a for a in arguments]
        results = [Slot(r) if is_tensor(r) and r.numel() else None for r in placed]
        self.operations.append((func, spec, arguments, results, addresses))

    def graph(self, segments: Any) -> CapturedGraph:
        """An operation has a function by its operator, and a block that says how many parameters it has, and which
        operation it is, sizes included."""
        nodes = tuple(
            KernelNode(
                index=i,
                handle=i,
                name=str(operation[0]),
                func=self.owner.function_of(operation),
                kern=0,
                ctx=0,
                grid=(1, 1, 1),
                block=(len(operation[4]), self.owner.number_of(operation[:4]), 1),
                shared_bytes=0,
                parameters=tuple((8 * k, address.to_bytes(8, "little")) for k, address in enumerate(operation[4])),
            )
            for i, operation in enumerate(self.operations)
        )
        edges = tuple(itertools.pairwise(range(len(nodes))))
        return CapturedGraph(nodes, edges, tuple(segments), self.low, self.high, tuple(self.conditionals))

    def discard(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.owner.open -= 1


class Executable:
    """Runs the operations that the nodes of a template say, at the addresses that they hold. The driver of
    `relaunch_driver` delivers them here, and launches it. A place for a node has the number of its words, its
    operation, its grid, and the words."""

    direct = True
    MOST = 64

    def __init__(self, device: FakeDevice, template: Any) -> None:
        self.device = device
        kernels = [node for node in template.nodes if isinstance(node, KernelNode)]
        self.nodes, self.slots = len(kernels), len(template.slots)
        self.places = [
            (ctypes.c_uint64 * (5 + self.MOST))(
                len(node.parameters),
                node.block[1],
                *node.grid,
                *(int.from_bytes(value, "little") for _, value in node.parameters),
            )
            for node in kernels
        ]
        self.indices = [node.index for node in kernels]
        self.branches = {each.setter: each.branches for each in template.conditionals}
        for i, each in enumerate(template.conditionals):
            inside = {node for other in template.conditionals[i:] for nodes in other.branches for node in nodes}
            assert each.setter not in inside, "an outer conditional comes before those in its branches"
        self.taken: list[bool] = []  # the outcomes of all conditions
        me = weakref.ref(self)
        self.run = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: me()._run())  # type: ignore[union-attr]
        nodes = [dataclasses.replace(n, handle=ctypes.addressof(p)) for n, p in zip(kernels, self.places)]
        self.template = dataclasses.replace(template, nodes=tuple(nodes))

    def raw_cuda_graph_exec(self) -> Any:
        return ctypes.cast(self.run, ctypes.c_void_p).value

    def bound(self) -> executable.Executable:
        return executable.Executable(self, self.template, self.replay, self.direct)  # type: ignore[arg-type]

    def _run(self) -> int:
        with torch.no_grad():
            self.replay()
        return 0

    def held(self, i: int) -> tuple[int, list[int]]:
        """The number of the operation of node i, and its words."""
        place = self.places[i]
        return place[1], list(place[5 : 5 + place[0]])

    def replay(self) -> None:
        left_out: set[int] = set()
        for i, index in enumerate(self.indices):
            if index in left_out:
                continue
            self.device.execute(*self.held(i))
            if (branches := self.branches.get(index)) is not None:
                self.taken.append(bool(tensor_at(self.held(i)[1][0], (), (), torch.bool)))
                left_out.update(branches[self.taken[-1]])


class Generator:
    """Counts what was drawn."""

    def __init__(self) -> None:
        self.offset = 0

    def get_offset(self) -> int:
        return self.offset


class FakeDevice:
    index = 0
    STREAM = 7
    captured = False
    functions = 0, 0, 0  # of torch, in C
    library_calls = None

    def __init__(self) -> None:
        relaunch_driver.driver().library.stub_reset()
        relaunch_driver.driver().library.stub_deliver()
        self.thread = threading.local()  # .recording
        self.open = 0  # recordings
        self.fail_captures = 0
        self.kept: list[int] = []  # what captures leave in use
        self.free_blocks: list[int] = []  # sizes
        self.random: list[bool] = []  # of each capture: was it told of random numbers?
        self.scratch: dict[int, torch.Tensor] = {}  # by address
        self.broken = False  # is the capture that is under way?
        self.selected = 0  # the thread's device
        self.asked = 0  # for it
        self.full = False
        self.generator = Generator()
        self.executables: list[Executable] = []
        self.numbers: dict[str, int] = {}
        self.numbered: list[Any] = [None]
        self.arrangements: list[Any] = []
        self.concurrent = True  # may nodes run side by side?
        self.without_conditionals = False
        self.relaxed = 0  # graphs in which something runs side by side

    def execute(self, number: int, words: Any) -> None:
        """Run an operation by its number, at the addresses and with the numbers among the words."""
        func, spec, arguments, results = self.numbered[number]
        at = iter(words)
        flat = [storage_at(next(at), *a.like) if isinstance(a, StorageSlot) else a for a in arguments]
        flat = [
            tensor_at(next(at), *a.like) if isinstance(a, Slot) else a.read(next(at)) if isinstance(a, Number) else a
            for a in flat
        ]
        args, kwargs = tree_unflatten(flat, spec)
        given = {t.data_ptr() for t in flat if is_tensor(t) or isinstance(t, STORAGES)}
        made = tree_flatten(func(*args, **kwargs))[0]
        for slot, value in zip(results, made, strict=True):
            if slot is not None:
                address = next(at)
                if address not in given:
                    tensor_at(address, *slot.like).copy_(value)

    def current(self) -> int:
        self.asked += 1
        return self.selected

    def allocated(self) -> tuple[int, int]:
        return 0, 0

    def is_capturing(self) -> bool:
        return self.captured

    @property
    def captured_by_user(self) -> bool:
        return self.captured

    @captured_by_user.setter
    def captured_by_user(self, captured: bool) -> None:
        self.captured = captured
        relaunch_driver.driver().library.stub_streams(ctypes.c_void_p(self.STREAM if captured else None), None)

    def stream_of(self, index: int) -> int:
        return self.STREAM

    def raw_alloc(self, size: int, stream: int) -> int:
        made = self.empty((size,), (1,), torch.uint8)
        self.scratch[made.data_ptr()] = made
        return made.data_ptr()

    def raw_delete(self, address: int) -> None:
        del self.scratch[address]

    def function_of(self, operation: Any) -> int:
        """A number for an operator with so many operands."""
        func, spec, arguments, _, words = operation
        return self.number_of((func, spec, [type(a) for a in arguments], len(words)))

    def number_of(self, what: Any) -> int:
        """A number for an operation with its sizes."""
        key = repr(tuple(map(describe, what)))
        if key not in self.numbers:
            self.numbers[key] = len(self.numbered)
            self.numbered.append(what)
        return self.numbers[key]

    def is_capture_broken(self) -> bool:
        return self.broken

    def guard(self) -> Any:
        return contextlib.nullcontext()

    def prepare(self) -> None:
        pass

    def prepare_conditionals(self) -> None:
        if self.without_conditionals:
            raise Unprovable("condition", "a graph can't choose between branches here")

    def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """The allocation function of generated code, and of relaunches."""
        if self.full:
            raise torch.OutOfMemoryError("no memory")
        recording = getattr(self.thread, "recording", None)
        if recording is not None:
            return recording.allocate(size, stride, dtype)
        with _disable_current_modes():  # generated code allocates without an operator
            made = torch.empty_strided(size, stride, dtype=dtype)
            if made.numel():
                torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(0xA5)
        return made

    def new_recording(self, gap: int, inputs: int = 0) -> Recording:
        return Recording(self, gap)

    def holes(self) -> list[int]:
        return self.free_blocks

    def generators(self, inputs: Any) -> list[Any]:
        return [self.generator, *(v for v in inputs if isinstance(v, Generator))]

    def random_state(self) -> Any:
        return torch.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def read(self, captured: Any) -> CapturedGraph:
        graph = captured.recording.graph(captured.segments)
        self.edges = graph.edges
        return graph

    def prove(self, graphs: Any, namespace: Any) -> Any:
        return prove(*graphs)

    def relax(self, captured: Any, graph: Any, template: Any, namespace: Any) -> Any:
        known = {"segments": captured.segments, "inputs": len(captured.layout.inputs)}
        known |= {"letters": letters_of(captured.recording.operations, self.function_of)}
        known |= {
            "products": captured.observer.products,
            "results": captured.observer.results,
            "is_device_memory": bool,
        }
        known |= {"room": lambda node: 1 << 20, "extent": lambda node: None}
        edges = None if captured.observer.products is None else relaxed(template, graph.edges, **known)
        self.relaxed += edges is not None
        self.edges = graph.edges if edges is None else tuple(edges)
        return self.edges

    def instantiate(self, captured: Any, arrangement: Any) -> list[executable.Executable]:
        operations = captured.recording.operations
        self.arrangements.append(arrangement)
        at = {node: i for i, node in enumerate(some_order(len(operations), self.edges))}
        made = []
        for template in [stage.template for stage in arrangement.stages] or [arrangement.template]:
            order = sorted(template.nodes, key=lambda node: at[node.index])
            made.append(self.executable(dataclasses.replace(template, nodes=tuple(order))))
        self.executables += made
        return [each.bound() for each in made]

    def executable(self, template: Any) -> Executable:
        return Executable(self, template)


def without_steps(model: Any, device: FakeDevice) -> Steps:
    """Return `Steps` that run the code as it is."""
    made = Steps(model, device)  # type: ignore[arg-type]
    made._left = 0
    return made


@contextlib.contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """A device on which runners relaunch, by the C module. Times are no measure here: each size is captured at once."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(relaunch, "implementation", relaunch_driver.module))
        stack.enter_context(mock.patch.object(executable, "launching", relaunch_driver.module().launching))
        stack.enter_context(mock.patch.object(Governor, "affords_capture", lambda *given: True))
        stack.enter_context(mock.patch.object(governor, "FEW", 1 << 30))  # each size is observed at its first call
        stack.enter_context(mock.patch.object(capture, "is_region", is_region))
        stack.enter_context(mock.patch.object(compiled_region, "Steps", without_steps))
        # It flushes the host's caches to time the guards of each frame.
        stack.enter_context(mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *given: 0.0))
        stack.enter_context(mock.patch.object(compiled_region, "FULL", 64))  # host memory is aligned to 64 bytes
        yield FakeDevice()


def describe(part: Any) -> Any:
    """What tells one part of an operation from another."""
    if isinstance(part, list):
        return [describe(each) for each in part]
    if isinstance(part, (Slot, StorageSlot)):
        return type(part).__name__, part.like
    if isinstance(part, Number):
        return type(part).__name__, part.letter
    return repr(bit_key(part))  # two NaNs may differ


def letters_of(operations: Any, function_of: Any) -> dict[int, str]:
    """What operators do with their operands and results, by the function handles that their nodes have."""
    found = {}
    for operation in operations:
        func, spec, arguments, results, _ = operation
        schema = getattr(func, "_schema", None)
        if schema is None or any(isinstance(a, StorageSlot) for a in arguments):
            continue
        args, kwargs = tree_unflatten(arguments, spec)
        declared = {argument.name: argument for argument in schema.arguments}
        letters = ""
        for argument, value in [*zip(schema.arguments, args), *((declared[name], v) for name, v in kwargs.items())]:
            written = argument.alias_info is not None and argument.alias_info.is_write
            letters += ("w" if written else "r") * sum(isinstance(leaf, Slot) for leaf in tree_flatten(value)[0])
        found[function_of(operation)] = letters + "w" * sum(isinstance(result, Slot) for result in results)
    return found


def some_order(nodes: int, edges: Any) -> list[int]:
    """One that the edges allow: what could come later comes as late as it can."""
    before: dict[int, set[int]] = {node: set() for node in range(nodes)}
    after: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for u, v in edges:
        before[v].add(u)
        after[u].add(v)
    order: list[int] = []
    while len(order) < nodes:
        last = min(node for node in after if not after[node])
        order.append(last)
        del after[last]
        for u in before[last]:
            after[u].discard(last)
    return order[::-1]
