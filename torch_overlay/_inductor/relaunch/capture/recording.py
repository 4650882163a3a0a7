"""Captures and executables on a real device; `capture` and `runner` know devices only by what is here.

    device = Cuda(index)
    recording = device.record(gap)          # an address space, and a graph that is captured in it
    with recording:
        x = recording.place(view)           # a tensor at an address of its own
        with recording.capturing(inputs, random):
            ...                             # runs no kernel; what it allocates lies in the space
            with recording.apart(None) as apart:
                ...                         # what it allocates has segments of its own: apart.segments
    arrangement, launchers = device.finish(first, second, namespace, arrange)
    recording.close()

Note [Memory pools of a capture]
A graph retains the pool that it is captured into, with every segment in it, and the books of the allocator would show
address space as reserved memory for as long as the graph lives. So the graph is begun with an empty pool; that one is
taken out of the allocator's list of active pools at once, and a pool of the address space is selected for the thread
in its place. It also means that one filter of the allocator matches at a time, whatever its rule for several. Before
the capture ends, the empty pool is put back, for the end of a capture takes its pool out of the list.

Note [Random numbers]
Kernels of a graph read a generator's seed and offset from memory, which a launch of the graph fills before. A generator
makes that memory when it is first used in a capture, by an ordinary allocation: it would land in the address space. So
the generators that the region draws from, as a run before has shown, are asked to make it before our pool is selected.
It goes with the graph. A generator that was not asked leaves an allocation in use (`kept`), and there is no graph.

Note [Streams of a capture]
A region is captured on a stream that nobody else knows, and so are its side streams: a stream that others could use in
the meantime would take their launches into the graph. The table of stream objects of the running frame is exchanged
for the time of the capture, and so are the copy streams of saved activations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_overlay import config
from torch_overlay._dynamo import objects
from torch_overlay._functorch.offload import runtime
from torch_overlay._inductor.relaunch.capture.address_space import AddressSpace
from torch_overlay._inductor.relaunch.graph import concurrency, fill_copy_kernels, read as graphs
from torch_overlay._inductor.relaunch.graph.driver import Driver, DriverError
from torch_overlay._inductor.relaunch.graph.subgraph import Part
from torch_overlay._inductor.relaunch.launch import memcpy_nodes, native
from torch_overlay._inductor.relaunch.memory.outputs import CHUNK
from torch_overlay._inductor.relaunch.prepare import prepare
from torch_overlay._inductor.relaunch.proof.prove import CapturedGraph, KernelNode, prove, Refusal, Template
from torch_overlay._inductor.relaunch.proof.signatures import parameters_of, signatures_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.capture import Captured
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement
    from torch_overlay._inductor.relaunch.memory.outputs import View

log = logging.getLogger(__name__)

# Blocks: fewer than a snapshot of everything lists in the time that one of a pool takes with nothing in it, 0.13 ms.
AS_LONG = 64

live_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()
live_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


class Launcher:
    """An executable graph, and what it takes to point it at other memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph | Part, template: Template, direct: bool = False) -> None:
        self.graph = graph
        self.template = template
        self.direct = direct  # it draws no random numbers: what launches it need not know the generators
        self.patcher: memcpy_nodes.Patcher | None = None
        if memcpy_nodes.moving(template):
            self.patcher = memcpy_nodes.Patcher(graph, template, upload=_upload, synchronize=torch.cuda.synchronize)
            self.exec = None  # the patcher's changes
            self.patch: Callable[..., int] = self.patcher.patch
        else:
            self.exec = native.implementation().Exec(
                graph.raw_cuda_graph_exec(), template.nodes, template.words, template.regions
            )
            self.patch = self.exec.patch
        # torch.cuda.CUDAGraph.replay looks for hooks first; its base class launches, and advances the generators.
        self.replay: Callable[[], None] = (
            graph.replay if isinstance(graph, Part) else torch._C._CUDAGraph.replay.__get__(graph)
        )
        live_launchers.add(self)

    @property
    def nodes(self) -> int:
        return len(self.template.nodes)


class Cuda:
    """One device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)
        self.concurrent = config.cudagraph_concurrency
        self.empty: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_empty_strided_cuda")  # noqa: B009
        self.is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self.current: Callable[[], int] = torch._C._cuda_getDevice
        self.stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.raw_alloc: Callable[[int, int], int] = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.raw_delete: Callable[[int], None] = torch._C._cuda_cudaCachingAllocator_raw_delete
        self.functions = native.torch_functions()

    def allocated(self) -> tuple[int, int]:
        """Allocations and bytes that the device's allocator was ever asked for. It takes a while."""
        stats = torch._C._cuda_memoryStats(self.index)
        return stats["allocation"]["all"]["allocated"], stats["requested_bytes"]["all"]["allocated"]

    def blocks(self) -> int:
        """How many blocks the device's allocator has, but for segments that are free as a whole."""
        stats = torch._C._cuda_memoryStats(self.index)
        return stats["active"]["all"]["current"] + stats["inactive_split"]["all"]["current"]

    def holes(self) -> list[int]:
        """Bytes of each free block of more than 1 MiB that an allocation on the current stream may be given, but for
        segments larger than a chunk that are free as a whole. Note [Chunks] of `memory.outputs`"""
        mine = {"device": self.index, "stream": self.stream_of(self.index), "segment_pool_id": (0, 0)}
        found = []
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["segment_type"] == "large" and mine.items() <= segment.items():
                most = CHUNK if len(segment["blocks"]) == 1 else segment["total_size"]
                free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
                found += [size for size in free if size <= most]
        return found

    def is_ordinary(self, address: int) -> bool:
        """Is this memory of the allocator in no pool of the caller's?"""
        return any(
            segment["segment_pool_id"] == (0, 0)
            for segment in torch.cuda.memory_snapshot(include_traces=False)
            if segment["device"] == self.index and 0 <= address - segment["address"] < segment["total_size"]
        )

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.index)

    def record(self, gap: int) -> Recording:
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise Refusal("allocator", f"the allocator {backend} can't be told to allocate elsewhere for a capture")
        return Recording(self, gap)

    def generators(self, inputs: Sequence[Any]) -> list[torch.Generator]:
        """Those that a region with these inputs can draw from."""
        given = [v for v in inputs if isinstance(v, torch.Generator) and v.device == self.device]
        return [torch.cuda.default_generators[self.index], *given]

    def random_state(self) -> Any:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Any) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def prepare(self) -> None:
        """What the first capture would have to wait for."""
        with self.guard():
            prepare(self.index)

    def finish(
        self,
        first: Captured,
        second: Captured,
        namespace: Mapping[str, Any],
        arrange: Callable[[Template, tuple[tuple[int, int], ...]], Arrangement],
    ) -> tuple[Arrangement, list[Launcher]]:
        """Proves the first capture by the second, and makes it executable as it is then arranged."""
        graph = first.recording.graph
        read = []
        with _no_collection():
            for captured in (first, second):
                for kept in graphs.tidy(captured.recording.graph).kept:
                    log.info("stays in the graph as it is: %s", kept)
                space = captured.recording.space
                read.append(graphs.read(captured.recording.graph, captured.segments, space.low, space.high))
            check_libraries(read[0])
            snapshot = functools.partial(torch.cuda.memory_snapshot, include_traces=False)
            template = prove(
                *read,
                foreign=graphs.freed_memory(snapshot),
                on_device=graphs.is_device_memory,
                signatures=signatures_of(namespace),
            )
            second.recording.discard()
            edges = self._run_side_by_side(graph, read[0], first, template, namespace)
            arrangement = arrange(template, edges)
            _held = memcpy_nodes.settle(arrangement.template, self._bytes)  # until the executables are made
            if arrangement.stages:
                try:
                    launchers = self._parts(graph, arrangement)
                except graphs.DriverError as error:  # it takes more memory as a whole, and works
                    log.warning("a backward is launched as a whole, for its graph could not be cut: %s", error)
                    arrangement = dataclasses.replace(arrangement, stages=())
                else:
                    graph.reset()
                    return arrangement, launchers
            graph.instantiate()
            _upload(graph)
            return arrangement, [Launcher(graph, arrangement.template, direct=not first.recording.fixed)]

    def _run_side_by_side(
        self,
        graph: torch.cuda.CUDAGraph,
        read: CapturedGraph,
        captured: Captured,
        template: Template,
        namespace: Mapping[str, Any],
    ) -> tuple[tuple[int, int], ...]:
        """The edges of the graph, some of which are taken away."""
        if captured.products is None:
            return read.edges
        driver = Driver()
        edges = concurrency.relaxed(
            template,
            read.edges,
            segments=captured.segments,
            inputs=len(captured.layout.inputs),
            letters=parameters_of(namespace) | fill_copy_kernels.letters,
            products=captured.products,
            results=captured.results,
            is_device_memory=functools.cache(functools.partial(graphs.is_device_memory, driver=driver)),
            room=self._room(driver),
            extent=fill_copy_kernels.extent,
        )
        if edges is None or not graphs.set_edges(graph, [node.handle for node in read.nodes], edges, driver=driver):
            return read.edges
        return tuple(edges)

    def _room(self, driver: Driver) -> Callable[[KernelNode], int]:
        """How many blocks of a kernel this device runs at once."""
        multiprocessors = torch.cuda.get_device_properties(self.index).multi_processor_count
        at_once = functools.cache(driver.blocks_at_once)

        def room(node: KernelNode) -> int:
            x, y, z = node.block
            try:
                return multiprocessors * max(at_once(node.func, x * y * z, node.shared_bytes), 1)
            except DriverError:
                return multiprocessors

        return room

    def _bytes(self, count: int) -> torch.Tensor:
        return self.empty((count,), (1,), torch.uint8)

    def _parts(self, graph: torch.cuda.CUDAGraph, arrangement: Arrangement) -> list[Launcher]:
        launchers = []
        for stage in arrangement.stages:
            part = Part(graph.raw_cuda_graph(), [node.handle for node in stage.template.nodes], self)
            _upload(part)
            launchers.append(Launcher(part, part.renamed(stage.template), direct=True))
        return launchers


def _upload(graph: Any) -> None:
    graphs.upload(graph, torch.cuda.current_stream().cuda_stream)


def check_libraries(graph: CapturedGraph) -> None:
    """Note [Collectives] of `policy`: an operator of the user's may contain one."""
    for node in graph.nodes:
        if "nccl" in (name := getattr(node, "name", "")):
            message = f"an operator of the region calls NCCL (kernel {name}), which keeps addresses that no proof sees"
            advice = "name the operator in torch._inductor.config.custom_should_partition_ops, which splits it off"
            raise Refusal("collective", f"{message}; {advice}")


class Apart:
    """What was allocated in a pool of its own: sizes of the segments by address, the bytes asked for, and whether no
    address was handed out twice."""

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self.requested = 0
        self.once = False


class Recording:
    def __init__(self, owner: Cuda, gap: int) -> None:
        self.owner, self.device = owner, owner.device
        self.space: Any = AddressSpace(owner.device, gap=gap)
        self.graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
        self._placed: dict[int, tuple[int, int]] = {}  # address that the space gave -> (address in use, bytes)
        self._ignored: set[int] = set()
        self._pools: list[Any] = []  # ids
        self._active: Any = None
        self._capturing: tuple[Driver, int] | None = None  # the graph, while it is captured
        self.fixed: list[int] = []  # addresses of words of 8 bytes, outside of the space, that stay with the graph
        live_recordings.add(self)

    def __enter__(self) -> Recording:
        self.space.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.space.__exit__(*exc_info)

    # -- memory

    def place(self, view: View, alignment: int = 256) -> torch.Tensor:
        """A tensor at an address that is aligned to so many bytes, and not to more if that is less than 256."""
        size = view.extent
        if not size:
            with _no_modes():  # an operator of ours is none of the region
                return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=self.device)
        skew = alignment if alignment < 256 else 0
        given = self.space.allocate(size + skew)
        self._placed[given] = (given + skew, size)
        storage = torch._C._construct_storage_from_data_pointer(given + skew, self.device, size)
        metadata = {"size": view.size, "stride": view.stride, "dtype": view.dtype, "storage_offset": 0}
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)

    def covers(self, address: int) -> bool:
        return self.space.low <= address < self.space.high

    def segments(self) -> list[tuple[int, int]]:
        """(address, size) of all that was allocated, in order."""
        used = ((address, size) for address, size in self.space.allocations() if address not in self._ignored)
        return [self._placed.get(address, (address, size)) for address, size in used]

    @contextlib.contextmanager
    def apart(self, asked: tuple[int, int] | None) -> Iterator[Apart]:
        """`asked`: how many allocations there will be, and of how many bytes, if that is known."""
        apart, before = Apart(), self.space.count()
        then = (0, 0) if asked is not None else self.owner.allocated()
        with self._selected(self.space.pool(no_split=True)):
            yield apart
        if self.space.count() == before:
            return
        count, apart.requested = asked if asked is not None else map(int.__sub__, self.owner.allocated(), then)
        apart.segments = dict(self.space.allocations(before))
        # Of the whole device: another thread may be counted, which makes more of what is here.
        apart.once = count == len(apart.segments)

    def new_pool(self) -> Any:
        return self.space.pool()

    @contextlib.contextmanager
    def within(self, pool: Any) -> Iterator[list[int]]:
        """What this thread allocates comes from the pool. Yields a list, which gets the addresses of new segments."""
        made: list[int] = []
        before = self.space.count()
        with self._selected(pool):
            yield made
        made += [address for address, _ in self.space.allocations(before)]

    def count(self) -> int:
        """How many nodes the graph has by now."""
        if self._capturing is None:
            driver = Driver()
            self._capturing = driver, driver.captured_into(_streams(self.device.index).get(0).cuda_stream)
        driver, graph = self._capturing
        return driver.count(graph)

    def clear_stack(self) -> None:
        """What a launcher leaves uninitialised is to be of this capture: `proof.prove`, Note [What a word can hide]."""
        self.space.clear_stack()

    def kept(self) -> list[int]:
        """Sizes of what is still in use of all that was allocated in pools."""
        kept = self._in_use()
        if kept:  # it may be garbage, for nobody collected it
            gc.collect()
            kept = self._in_use()
        return kept

    def _in_use(self) -> list[int]:
        pools, snapshot = set(self._pools), functools.partial(torch.cuda.memory_snapshot, include_traces=False)
        if len(pools) * AS_LONG > self.owner.blocks():
            segments = [segment for segment in snapshot() if segment["segment_pool_id"] in pools]
        else:
            segments = [segment for pool in pools for segment in snapshot(pool)]
        blocks = [b for segment in segments for b in segment["blocks"]]
        return [b["size"] for b in blocks if b["state"] == "active_allocated"]

    @contextlib.contextmanager
    def _selected(self, pool: Any) -> Iterator[None]:
        """This thread allocates from the pool, and from no other."""
        index, before = self.device.index, self._active
        if before is not None:
            torch._C._cuda_endAllocateToPool(index, before.id)
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool.id)
        self._active = pool
        self._pools.append(pool.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, pool.id)
            torch._C._cuda_releasePool(index, pool.id)
            self._active = before
            if before is not None:
                # The first selection's reference is still held: this one gives its own back.
                torch._C._cuda_beginAllocateCurrentThreadToPool(index, before.id)
                torch._C._cuda_releasePool(index, before.id)

    # -- the graph

    @contextlib.contextmanager
    def capturing(self, inputs: Sequence[Any], random: bool) -> Iterator[None]:
        """What this thread launches goes into the graph."""
        streams = _streams(self.device.index)
        main = streams.get(0)
        main.wait_stream(torch.cuda.current_stream(self.device))
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            torch.cuda.current_blas_handle()  # to create one later would break the capture
            torch._C._cuda_clearCublasWorkspaces()
            # Workspaces that the capture took must not be used after it.
            stack.callback(torch._C._cuda_clearCublasWorkspaces)
            stack.enter_context(_no_collection())
            stack.enter_context(torch.cuda.stream(main))
            stack.enter_context(_exchanged_streams(streams))
            stack.enter_context(self._graph_begun())
            if random:
                self._hold_generators(inputs)
            with self._selected(self.space.pool()):
                self._check_pool()
            stack.enter_context(self._selected(self.space.pool()))
            yield

    def _check_pool(self) -> None:
        """Do allocations of this thread land here? If not, a pool that the caller has selected is before ours."""
        before = self.space.count()
        # Not a tensor: those may be filled, and that would be a node of the graph.
        address = torch.UntypedStorage(16, device=self.device).data_ptr()
        self._ignored |= {given for given, _ in self.space.allocations(before)}
        if not self.covers(address):
            raise RuntimeError("another memory pool is selected in this thread")  # may be none at the next call

    def _hold_generators(self, inputs: Sequence[Any]) -> None:
        """Note [Random numbers]"""
        for generator in self.owner.generators(inputs):
            seed, offset, _ = generator.philox_state(0)
            # Two generators can have one state.
            self.fixed += [t.data_ptr() for t in (seed, offset) if t.data_ptr() not in self.fixed]

    @contextlib.contextmanager
    def _graph_begun(self) -> Iterator[None]:
        """Note [Memory pools of a capture]."""
        index, empty = self.device.index, torch.cuda.graph_pool_handle()
        self.graph.capture_begin(pool=empty, capture_error_mode="thread_local")
        torch._C._cuda_endAllocateToPool(index, empty)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken, and what broke it is what to report
                self._end_graph(empty)
            raise
        self._end_graph(empty)

    def _end_graph(self, empty: Any) -> None:
        index = self.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, empty)
        try:
            self.graph.capture_end()
        except BaseException:
            # It may have ended before the allocator heard of it.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, empty)
            raise
        finally:
            torch._C._cuda_releasePool(index, empty)

    def discard(self) -> None:
        """Nothing of it is needed."""
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.reset()
        self.close()

    def close(self) -> None:
        """Gives the addresses back. The graph lives on if somebody holds it."""
        self.graph = None
        if self.space is not None:
            self.space.close()
            self.space = None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The collector could destroy things whose destruction a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _no_modes() -> contextlib.AbstractContextManager[Any]:
    """Without the modes that see operators; most often there are none, and one look tells."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


class _Streams:
    """Streams of a device that captures alone use; made at need, and kept."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.made: list[torch.cuda.Stream] = []

    def get(self, number: int) -> torch.cuda.Stream:
        while len(self.made) <= number:
            from cuda.bindings import driver  # pyrefly: ignore[missing-module-attribute]

            with torch.cuda.device(self.index):
                code, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            if int(code):
                raise RuntimeError(f"CUDA driver error in cuStreamCreate: {code}")
            self.made.append(torch.cuda.ExternalStream(int(handle), device=self.index))
        return self.made[number]


@functools.cache
def _streams(index: int) -> _Streams:
    return _Streams(index)


@contextlib.contextmanager
def _exchanged_streams(streams: _Streams) -> Iterator[None]:
    """Note [Streams of a capture]."""
    names: dict[tuple[int, int], int] = {(-1, 0): 0}
    memcpy_nodes = runtime.exchanged(lambda number: streams.get(names.setdefault((-2, number), len(names))))
    with memcpy_nodes, _exchanged_table(streams, names):
        yield


@contextlib.contextmanager
def _exchanged_table(streams: _Streams, names: dict[tuple[int, int], int]) -> Iterator[None]:
    table = objects.current()
    if table is None:
        yield
        return
    exchanged = []
    for index, found in enumerate(table):
        if type(found) is objects.Owned:
            # An owned stream is made when it is first looked up; an owned event stays.
            found = found.resolve()
        if isinstance(found, torch.Stream):
            key = (found.device_index, found.stream_id) if index else (-1, 0)
            found = streams.get(names.setdefault(key, len(names)))
        exchanged.append(found)
    objects.install(exchanged)
    try:
        yield
    finally:
        objects.install(table)
