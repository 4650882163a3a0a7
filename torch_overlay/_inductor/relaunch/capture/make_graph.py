"""Makes executable graphs of a compiled region: record twice, prove, relax the edges, arrange, instantiate.

record       the region runs on placeholder addresses, and its launches are recorded (`capture`)
prove        a second capture at other addresses; each argument word that differs must be explained (`proof.prove`)
relax        edges between nodes that share no memory are removed, so that they run in parallel (`graph.concurrency`)
arrange      allocations share memory where they can, and a backward may be cut into stages (`memory.arrange`)
instantiate  the graph, or a part of it for each stage, becomes executable (`launch.executable`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.branches import has_branches
from torch_overlay._inductor.relaunch.capture.capture import Astray, Capture, is_region
from torch_overlay._inductor.relaunch.capture.recording import no_collection
from torch_overlay._inductor.relaunch.capture.streams import check
from torch_overlay._inductor.relaunch.memory.arrange import arrange, Arrangement, Proven
from torch_overlay._inductor.relaunch.memory.outputs import OfInput, SameInput
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped, perturbed, slots_of, with_numbers_of
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay._inductor.relaunch.capture.capture import CaptureRequest
    from torch_overlay._inductor.relaunch.launch.executable import Executable
    from torch_overlay._inductor.relaunch.memory.packing import Life
    from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, Template

ATTEMPTS = 3
# Reasons after which other addresses are tried: a number may equal an address of these captures by chance, or a library
# may allocate more when it is first used.
COINCIDENCES = ("unmoved", "outside", "ambiguous", "moved", "layout")

# One capture at a time in the process: while one thread captures, any other thread runs its region as compiled.
capturing = threading.Lock()


def make_graph(request: CaptureRequest) -> tuple[Arrangement, list[Executable]]:
    """Capture a region, and return its arrangement and an executable for each of its stages. Raises Unprovable, or what
    the region itself raises; NumberEscaped if a launch can't compute with the numbers."""
    try:
        with no_collection():  # which takes longer than a capture, once all that compiling has made is walked
            return _make_graph(request)
    except (NumberEscaped, torch.OutOfMemoryError):
        raise
    except Exception as error:  # for code that uses traced numbers where they are not expected
        if request.numbers:
            raise NumberEscaped(frozenset(request.numbers), f"{type(error).__name__}: {error}") from error
        raise


def _make_graph(request: CaptureRequest) -> tuple[Arrangement, list[Executable]]:
    device, code = request.device, request.code
    check(request.model)
    if has_branches(request.model):
        device.prepare_conditionals()
    holes = device.holes() if code.saved_outputs else []
    with_uses = device.concurrent and not code.is_training
    others = {k: perturbed(value) for k, value in request.numbers.items()}

    def capture(recording: Any, **options: Any) -> Capture:
        return Capture(request, recording, holes=holes, **options).run()

    with recordings(request) as new_recording:
        for _ in range(ATTEMPTS):
            recording = new_recording(1)
            try:
                first = capture(recording, with_uses=with_uses)
                break
            except Astray as astray:  # the capture has learned which allocations are outputs
                recording.discard()
                request = request._replace(plan=astray.plan)
        else:
            raise Unprovable("output", "an output's memory can't be told from temporary memory")
        request = request._replace(plan=dataclasses.replace(request.plan, asked=first.observer.asked))
        graph = device.read(first)
        second = capture(new_recording(2), numbers=others)
        try:
            template = _prove(request, (first, second), graph)
        except Unprovable as refusal:
            if refusal.reason not in COINCIDENCES:
                raise
            # Reserved before the first ranges are freed: the number that equals an address must not be one again.
            elsewhere = new_recording(3)
            first.recording.discard()
            second.recording.discard()
            first, second = capture(elsewhere, with_uses=with_uses), capture(new_recording(5), numbers=others)
            graph = device.read(first)
            template = _prove(request, (first, second), graph)
        lives = [a.either(b) for a, b in zip(first.lives, second.lives, strict=True)]
        second.recording.discard()
        edges = device.relax(first, graph, template, request.namespace)
        arrangement = arrange(_proven(request, first, lives, template, edges))
        return arrangement, device.instantiate(first, arrangement)


@contextlib.contextmanager
def recordings(request: CaptureRequest) -> Iterator[Callable[[int], Any]]:
    """Yield a function that makes recordings, by the width of their gaps; close all of them at the end."""
    inputs = sum(v.nbytes for v in request.inputs if is_region(v) and v.layout is torch.strided)

    with contextlib.ExitStack() as made:

        def new_recording(gap: int) -> Any:
            return made.enter_context(contextlib.closing(request.device.new_recording(gap, inputs)))

        yield new_recording


def _prove(request: CaptureRequest, captures: tuple[Capture, Capture], graph: CapturedGraph) -> Template:
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
    template = request.device.prove((graph, other), request.namespace)
    return dataclasses.replace(template, numbers=numbers)


def _proven(
    request: CaptureRequest,
    captured: Capture,
    lives: Sequence[Life],
    template: Template,
    edges: tuple[tuple[int, int], ...],
) -> Proven:
    layout, dying = captured.layout, request.plan.dying
    storages = [request.inputs[k].untyped_storage() for k in layout.inputs]
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
        stages=request.code.is_backward and not captured.recording.fixed,
    )
