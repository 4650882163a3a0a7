"""Makes executable graphs of a compiled region: record twice, prove, relax the edges, arrange, instantiate.

record       the region runs on placeholder addresses, and its launches are recorded (`capture`)
prove        a second capture at other addresses; each argument word that differs must be explained (`proof.prove`).
             For a further size, of the library calls alone that launch functions never seen (`library_calls`)
relax        edges between nodes that share no memory are removed, so that they run in parallel (`graph.concurrency`)
arrange      allocations share memory where they can, and a backward may be cut into stages (`memory.arrange`)
instantiate  the graph, or a part of it for each stage, becomes executable (`launch.executable`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from types import MappingProxyType
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan, namespace_of
from torch_overlay._inductor.relaunch.capture.capture import Capture, Captured, is_region
from torch_overlay._inductor.relaunch.capture.library_calls import calls_of, capture_again, Differs
from torch_overlay._inductor.relaunch.capture.recording import check, no_collection
from torch_overlay._inductor.relaunch.capture.repeated_calls import order_of, with_repeats
from torch_overlay._inductor.relaunch.causes import log
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.memory.arrange import arrange, Arrangement, Proven
from torch_overlay._inductor.relaunch.memory.outputs import OfInput, SameInput
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped, perturbed, slots_of, with_numbers_of
from torch_overlay._inductor.relaunch.proof.functions import one_of_each, without
from torch_overlay._inductor.relaunch.proof.nodes import Template, Unprovable


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.memory.packing import Life
    from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, Node, PointerSlot
    from torch_overlay._inductor.relaunch.sizes.sizes import Sizes

    Known: TypeAlias = "tuple[list[PointerSlot], Collection[int]]"

ATTEMPTS = 3
# Reasons after which other addresses are tried: a number may equal an address of these captures by chance, or a library
# may allocate more when it is first used.
COINCIDENCES = ("unmoved", "outside", "ambiguous", "moved", "layout")

# One capture at a time in the process: while one thread captures, any other thread runs its region as compiled.
capturing = threading.Lock()


class CaptureRequest(NamedTuple):
    """A region that is to be captured, and the call that captures it. `alignments`: to how many bytes each input is
    aligned. `numbers`: values of the inputs that a launch is to compute with, by position. `is_shared`: the executable
    may be that of another size, `sizes.sizes`."""

    device: Cuda
    model: Callable[[list[Any]], Any]
    inputs: Sequence[Any]
    alignments: Sequence[int]
    plan: AllocationPlan
    code: CodeFacts
    sizes: Sizes
    numbers: Mapping[int, Any] = MappingProxyType({})
    is_shared: bool = False

    @property
    def namespace(self) -> dict[str, Any]:
        return namespace_of(self.model) or {}

    def capture(self, recording: Any, **options: Any) -> Captured:
        options = {"numbers": self.numbers, **options}
        return Capture(self.model, self.inputs, self.alignments, self.plan, recording, **options).run(self.code)


def make_graph(request: CaptureRequest) -> tuple[Arrangement, list[Any]]:
    """Capture a region, and return its arrangement and a launcher for each of its stages. Raises Unprovable, or what
    the region itself raises; NumberEscaped if a launch can't compute with the numbers."""
    try:
        with no_collection():  # which takes longer than a capture, once all that compiling has made is walked
            if request.is_shared and not request.numbers and request.sizes.may_leave_out():
                try:
                    made = _make_graph(request, leaves_out=True)
                except (NumberEscaped, torch.OutOfMemoryError):
                    raise
                except Exception as why:  # whatever comes of it, the region may be fine
                    request.sizes.note_left_out(False)
                    log.info("each call of a library is captured: %s", why)
                else:
                    request.sizes.note_left_out(True)
                    return made
            return _make_graph(request)
    except (NumberEscaped, torch.OutOfMemoryError):
        raise
    except Exception as error:  # for code that uses traced numbers where they are not expected
        if request.numbers:
            raise NumberEscaped(frozenset(request.numbers), f"{type(error).__name__}: {error}") from error
        raise


def _make_graph(request: CaptureRequest, leaves_out: bool = False) -> tuple[Arrangement, list[Any]]:
    """With `leaves_out`, calls are left out that repeat earlier ones; raises Differs or NoExecutable if none may be."""
    device, code, sizes = request.device, request.code, request.sizes
    check(request.model)
    holes = device.holes() if code.saved_outputs and not request.is_shared else []
    with_uses = device.concurrent and not code.is_training and not request.is_shared
    others = {k: perturbed(value) for k, value in request.numbers.items()}
    with_calls = request.is_shared and not request.numbers

    def capture(recording: Any, **options: Any) -> Captured:
        return request.capture(recording, holes=holes, **options)

    with recordings(request) as new_recording:
        noting = {"with_uses": with_uses, "with_calls": with_calls, "leaves_out": leaves_out}
        first = capture(new_recording(1), **noting)
        for _ in range(ATTEMPTS - 1):
            if first.plan == request.plan:
                break
            request = request._replace(plan=first.plan)  # the capture has learned which allocations are outputs
            first.recording.discard()
            first = capture(new_recording(1), **noting)
        request = request._replace(plan=dataclasses.replace(request.plan, asked=first.asked))
        graph, lives = device.read(first), first.lives
        known = _known(request, graph)
        if (template := _prove_alone(request, first, graph, known, new_recording)) is None:
            if first.repeats:
                raise Differs("a call that is not made twice launches an unknown function")
            second = capture(new_recording(2), numbers=others)
            try:
                template = _prove(request, (first, second), graph, known)
            except Unprovable as refusal:
                if refusal.reason not in COINCIDENCES:
                    raise
                # Reserved before the first ranges are freed: the number that equals an address must not be one again.
                elsewhere = new_recording(3)
                first.recording.discard()
                second.recording.discard()
                first, second = capture(elsewhere, with_uses=with_uses), capture(new_recording(5), numbers=others)
                graph = device.read(first)
                known = _known(request, graph)
                template = _prove(request, (first, second), graph, known)
            lives = [a.either(b) for a, b in zip(first.lives, second.lives, strict=True)]
            second.recording.discard()
            sizes.functions.learn(template)
        if first.repeats:
            graph, template, lives = with_repeats(first, graph, template, sizes.numbers_of)
        copies = executable.moving(template)
        if first.repeats and copies:
            raise Differs("it has copies between memories, which need an executable of their own")
        if template.numbers and copies:
            raise NumberEscaped(frozenset(request.numbers), "copies between memories are patched one by one")
        edges = device.relax(first, graph, template, request.namespace)
        proven = _proven(first, lives, template, edges, request.inputs, request.plan.dying, code)
        if request.is_shared and not copies:
            return sizes.launchers(device, first, graph, proven, request.plan.drawn)
        return device.instantiate(first, arrange(proven))


def _known(request: CaptureRequest, graph: CapturedGraph) -> Known:
    """Return the pointer slots of the nodes that need no second capture, and the nodes that need one."""
    if not request.is_shared:
        return [], range(len(graph.nodes))
    slots, unknown = request.sizes.functions.slots_of(graph)
    if unknown:
        why = "; ".join(dict.fromkeys(unknown.values()))
        log.info("something is captured again for %d of %d nodes: %s", len(unknown), len(graph.nodes), why)
    return slots, unknown


def _prove_alone(
    request: CaptureRequest, first: Captured, graph: CapturedGraph, known: Known, new_recording: Callable[[int], Any]
) -> Template | None:
    """Return the template of the capture, of which this is the graph, if no second one of the whole region is needed:
    for each unknown function, one call of a library that launches it is captured again, alone."""
    slots, unknown = known
    functions = request.sizes.functions
    if unknown and first.calls:
        recording = new_recording(2)
        try:
            functions.learn(_prove_calls(request, first, graph, one_of_each(graph, unknown), recording))
        except Exception as why:  # whatever a library does when it is called alone, the region may be fine
            log.info("the whole region is captured again: %s", why)
            return None
        finally:
            recording.discard()
        more, unknown = functions.slots_of(graph, unknown)
        slots = [*slots, *more]
    if unknown:
        return None
    regions = 1 + max((segment.region for segment in first.segments), default=-1)
    return Template(regions, graph.nodes, tuple(slots), slots_of(first.launches.uses, first.numbers, graph))


def _prove_calls(
    request: CaptureRequest, first: Captured, graph: CapturedGraph, wanted: set[int], recording: Any
) -> Template:
    """Make the calls of libraries again that launched the wanted nodes, and return a template of these calls' nodes."""
    order = order_of(graph)
    calls = calls_of(first.calls, {place for place, index in enumerate(order) if index in wanted})
    other = request.device.read(capture_again(calls, first.segments, recording))
    nodes = [graph.nodes[order[place]] for call in calls for place in call.nodes]
    others = [other.nodes[index] for index in order_of(other)]
    return request.device.prove((_alone(graph, nodes), _alone(other, others)), request.namespace)


def _alone(graph: CapturedGraph, nodes: Sequence[Node]) -> CapturedGraph:
    """Return a graph of these nodes, in this order, and without edges."""
    numbered = tuple([dataclasses.replace(node, index=index) for index, node in enumerate(nodes)])
    return dataclasses.replace(graph, nodes=numbered, edges=(), partial=())


@contextlib.contextmanager
def recordings(request: CaptureRequest) -> Iterator[Callable[[int], Any]]:
    """Yield a function that makes recordings, by the width of their gaps; close all of them at the end."""
    inputs = sum(v.nbytes for v in request.inputs if is_region(v) and v.layout is torch.strided)

    with contextlib.ExitStack() as made:

        def new_recording(gap: int) -> Any:
            return made.enter_context(contextlib.closing(request.device.new_recording(gap, inputs)))

        yield new_recording


def _prove(
    request: CaptureRequest, captures: tuple[Captured, Captured], graph: CapturedGraph, known: Known
) -> Template:
    """Prove the first capture, of which this is the graph, against the second, and return its template."""
    first, second = captures
    if first.layout != second.layout or first.places != second.places:
        raise Unprovable("layout", "two captures of the region differ in their outputs or in their scratch memory")
    other = request.device.read(second)
    numbers = slots_of(first.launches.uses, first.numbers, graph)
    if numbers != slots_of(second.launches.uses, second.numbers, other):
        raise NumberEscaped(frozenset(request.numbers), "two captures compute other parameters from it")
    if len(graph.nodes) == len(other.nodes):  # otherwise the proof says so
        other = with_numbers_of(other, graph, numbers)
    slots, unknown = known
    rest = {node.index for node in graph.nodes if node.index not in unknown}
    template = request.device.prove((without(graph, rest), without(other, rest)), request.namespace)
    nodes = tuple(graph.nodes[node.index] if node.index in rest else node for node in template.nodes)
    return dataclasses.replace(template, nodes=nodes, slots=(*slots, *template.slots), numbers=numbers)


def _proven(
    captured: Captured,
    lives: Sequence[Life],
    template: Template,
    edges: tuple[tuple[int, int], ...],
    inputs: Sequence[Any],
    dying: frozenset[int],
    code: CodeFacts,
) -> Proven:
    layout = captured.layout
    storages = [inputs[k].untyped_storage() for k in layout.inputs]
    addresses = [storage.data_ptr() for storage in storages]
    holders = {address: k for k, address in reversed(list(enumerate(addresses)))}
    returned = {r.input for r in layout.recipes if isinstance(r, (SameInput, OfInput))}
    return Proven(
        layout,
        template,
        edges,
        captured.places,
        tuple(lives),
        holders=tuple([holders[address] for address in addresses]),
        held=tuple(storage.nbytes() for storage in storages),
        static=frozenset(r for r, k in enumerate(layout.inputs) if k not in dying or k in returned),
        stages=code.is_backward and not captured.recording.fixed,
    )
