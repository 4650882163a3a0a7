"""Makes captures and executables on a real device; `capture` and `runner` use devices only through this interface.

    device = Cuda(index)
    recording = device.new_recording(gap)   # an address space, and a graph that is captured in it
    with recording:
        x = recording.place(view)           # a tensor at an address of its own
        with recording.capturing(inputs, random):
            ...                             # runs no kernel; what it allocates lies in the space
            with recording.apart(None) as apart:
                ...                         # what it allocates has segments of its own: apart.segments
    graph, template = device.prove(first, second, namespace)
    edges = device.relax(first, graph, template, namespace)
    executables = device.instantiate(first, arrange(...))
    recording.close()

`make_graph` runs these steps. The recording is that of `capture.recording`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config
from torch_overlay._inductor.relaunch.capture import calls, kernel_names
from torch_overlay._inductor.relaunch.capture.recording import Recording
from torch_overlay._inductor.relaunch.capture.streams import capture_stream
from torch_overlay._inductor.relaunch.graph import concurrency, fill_copy_kernels, read as graphs
from torch_overlay._inductor.relaunch.graph.conditional_nodes import find_setter, nested, Setter
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.launch.executable import Executable, part_of, upload
from torch_overlay._inductor.relaunch.memory.outputs import CHUNK
from torch_overlay._inductor.relaunch.proof.functions import parameters_of, signatures_of
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode, Template, Unprovable
from torch_overlay._inductor.relaunch.proof.prove import prove
from torch_overlay.csrc import DriverError


if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.capture import Capture
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement


log = logging.getLogger(__name__)


@functools.cache
def prepare(device: int) -> None:
    """Load all that a capture on the current device needs: the C module, the driver's bindings, and the kernels that
    replace memset and memcpy nodes."""
    try:
        executable.implementation()
        Driver()
        fill_copy_kernels.prepare(device)
    except Exception as error:  # also Triton's own errors; a capture that needs it will report it
        log.info("a capture can't be prepared for: %s", error)


@functools.cache
def _setter(device: int) -> Setter:
    with torch.cuda.device(device):
        return find_setter(capture_stream(device), Driver())


def prepare_early() -> None:
    """Prepare for captures on the current device before there is one, if modules may be loaded there, while Inductor
    waits for its workers to compile kernels: the process has a context there already (a new context would take hundreds
    of MiB of the device), and the current stream is not being captured, which may forbid it."""
    if not torch.cuda.is_initialized() or not torch._C._cuda_hasPrimaryContext(torch.cuda.current_device()):
        return
    if not torch.cuda.is_current_stream_capturing():
        prepare(torch.cuda.current_device())


class Cuda:
    """A CUDA device, with the functions of torch that act on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)
        self.concurrent = config.cudagraph_concurrency
        self.annotates = config.nvtx is True and kernel_names.are_available()
        self.empty: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_empty_strided_cuda")  # noqa: B009
        self.is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self.current: Callable[[], int] = torch._C._cuda_getDevice
        self.stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.raw_alloc: Callable[[int, int], int] = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.raw_delete: Callable[[int], None] = torch._C._cuda_cudaCachingAllocator_raw_delete
        self.functions = executable.torch_functions()

    @functools.cached_property
    def driver(self) -> Driver:
        return Driver()

    @property
    def library_calls(self) -> Any:
        """Return the entries of this device: Note [Library calls as entries] of `capture.calls`."""
        return calls.entries(self.index, self.empty)

    def prepare_conditionals(self) -> None:
        """Find what a capture with branches needs, before it begins. Raises Unprovable where there can be none."""
        _setter(self.index)

    def read_predicate(self, predicate: torch.Tensor) -> None:
        """Launch the kernel that sets a condition, in a capture."""
        self.driver.launch_kernel(_setter(self.index).of(predicate.data_ptr()), self.stream_of(self.index))

    def allocated(self) -> tuple[int, int]:
        """Return how many allocations, and how many bytes, the device's allocator was ever asked for. This call is
        slow, but for `torch.cuda.memory_stats` it would be slower: that lists all pools that there ever were."""
        stats = torch._C._accelerator_getDeviceStats(self.index)
        return stats["allocation"]["all"]["allocated"], stats["requested_bytes"]["all"]["allocated"]

    def is_unused(self, pool: tuple[int, int]) -> bool:
        """True if nothing that was allocated from the pool is in use."""
        return torch._C._cuda_checkPoolLiveAllocations(self.index, pool, set())

    def holes(self) -> list[int]:
        """Return the bytes of each free block of more than 1 MiB that an allocation on the current stream may get,
        except segments larger than a chunk that are entirely free. See `memory.outputs`."""
        mine = {"device": self.index, "stream": self.stream_of(self.index), "segment_pool_id": (0, 0)}
        found = []
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["segment_type"] == "large" and mine.items() <= segment.items():
                most = CHUNK if len(segment["blocks"]) == 1 else segment["total_size"]
                free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
                found += [size for size in free if size <= most]
        return found

    def is_capture_broken(self) -> bool:
        """True if the current stream's capture has failed."""
        return self.driver.is_broken(self.stream_of(self.index))

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.index)

    def new_recording(self, gap: int, inputs: int = 0) -> Recording:
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise Unprovable("allocator", f"the allocator {backend} can't be told to allocate elsewhere for a capture")
        return Recording(self, gap, inputs)

    def generators(self, inputs: Sequence[Any]) -> list[torch.Generator]:
        """Return the random generators that a region with these inputs can draw from."""
        given = [v for v in inputs if isinstance(v, torch.Generator) and v.device == self.device]
        return [torch.cuda.default_generators[self.index], *given]

    def random_state(self) -> Any:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Any) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def prepare(self) -> None:
        """Load what the first capture would have to wait for."""
        with self.guard():
            prepare(self.index)

    def lines(
        self, namespace: Mapping[str, Any], nodes: Callable[[], Sequence[int]]
    ) -> kernel_names.KernelLines | None:
        """Return what notes the lines of nodes while they are captured, if profiles are to show them."""
        return kernel_names.KernelLines(namespace, nodes) if self.annotates else None

    def read(self, captured: Capture) -> CapturedGraph:
        """Tidy the graph of a capture, and return it as plain data."""
        space, made = captured.recording, dict[int, int]()
        for kept in graphs.tidy(space.graph, driver=self.driver, made=made):
            log.info("stays in the graph as it is: %s", kept)
        found = [each.renamed(lambda node: made.get(node, node)) for each in space.conditionals]
        given = captured.segments, space.low, space.high
        graph = graphs.read(space.graph, *given, driver=self.driver, conditionals=found)
        check_libraries(graph)
        return graph

    def prove(self, graphs_read: tuple[CapturedGraph, CapturedGraph], namespace: Mapping[str, Any]) -> Template:
        """Prove the graph of a capture against that of a second one, and return its template."""
        snapshot = functools.partial(torch.cuda.memory_snapshot, include_traces=False)
        return prove(
            *graphs_read,
            foreign=graphs.freed_memory(snapshot),
            on_device=self.driver.is_device_memory,
            signatures=signatures_of(namespace),
        )

    def relax(
        self, captured: Capture, graph: CapturedGraph, template: Template, namespace: Mapping[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        """Remove edges from the graph that order nodes needlessly; return the edges that are left."""
        if captured.observer.products is None:
            return graph.edges
        edges = concurrency.relaxed(
            template,
            graph.edges,
            segments=captured.segments,
            inputs=len(captured.layout.inputs),
            letters=parameters_of(namespace) | fill_copy_kernels.letters,
            products=captured.observer.products,
            results=captured.observer.results,
            is_device_memory=functools.cache(self.driver.is_device_memory),
            room=self._room(),
            extent=fill_copy_kernels.extent,
        )
        handles = [node.handle for node in graph.nodes]
        if edges is None or not graphs.set_edges(captured.recording.graph, handles, edges, driver=self.driver):
            return graph.edges
        return tuple(edges)

    def instantiate(self, captured: Capture, arrangement: Arrangement) -> list[Executable]:
        """Return an executable for each stage, or one for the whole graph."""
        graph, templates = captured.recording.graph, [stage.template for stage in arrangement.stages]
        _held = executable.settle(arrangement.template, self.empty)  # must live until the executables are made
        if templates:
            parts = [self._part(graph, template) for template in templates]
            self._annotate(captured, templates, parts)
            graph.reset()
            return parts
        template = arrangement.template
        if template.conditionals:
            template = nested(self.driver, graph.raw_cuda_graph(), template, _setter(self.index))
        graph.instantiate()
        upload(graph)
        # torch.cuda.CUDAGraph.replay looks for hooks first; its base class just advances the generators and launches.
        replay = torch._C._CUDAGraph.replay.__get__(graph)
        made = [Executable(graph, template, replay, not captured.recording.fixed)]
        self._annotate(captured, [arrangement.template], made)
        return made

    def _annotate(self, captured: Capture, templates: Sequence[Template], made: Sequence[Executable]) -> None:
        """Name the kernels of the executables, which have these nodes of the capture."""
        if (noted := captured.recording.lines) is not None:
            places = noted.places()
            for template, executable in zip(templates, made, strict=True):
                kernel_names.annotate(places, [node.handle for node in template.nodes], executable)

    def _room(self) -> Callable[[KernelNode], int]:
        """Return a function that says how many blocks of a kernel this device runs at once."""
        multiprocessors = torch.cuda.get_device_properties(self.index).multi_processor_count
        at_once = functools.cache(self.driver.blocks_at_once)

        def room(node: KernelNode) -> int:
            x, y, z = node.block
            try:
                return multiprocessors * max(at_once(node.func, x * y * z, node.shared_bytes), 1)
            except DriverError:
                return multiprocessors

        return room

    def _part(self, graph: torch.cuda.CUDAGraph, template: Template) -> Executable:
        setter = _setter(self.index) if template.conditionals else None
        part, template = part_of(graph.raw_cuda_graph(), template, self, setter=setter)
        upload(part)
        return Executable(part, template, part.replay, True)


def check_libraries(graph: CapturedGraph) -> None:
    """Refuse a graph with a kernel of NCCL: an operator of the user's contains a collective. Note [Collectives]"""
    for node in graph.nodes:
        if "nccl" in (name := getattr(node, "name", "")):
            message = f"an operator of the region calls NCCL (kernel {name}), which keeps addresses that no proof sees"
            advice = "name the operator in torch._inductor.config.custom_should_partition_ops, which splits it off"
            raise Unprovable("collective", f"{message}; {advice}")
