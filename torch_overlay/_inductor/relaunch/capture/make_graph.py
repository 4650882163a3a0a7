"""From a compiled region to executable graphs: record twice, prove, relax the edges, arrange, instantiate.

record       the region runs on addresses that mean nothing, and its launches are recorded (`capture`)
prove        the same again at other addresses, and every word that moved must be explained (`proof.prove`)
relax        edges between nodes that share no memory go, so that they run side by side (`graph.concurrency`)
arrange      what can share memory does, and a backward may be cut into stages (`memory.arrange`)
instantiate  the graph, or a part of it for each stage, becomes executable (`launch.launcher`)
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.capture.allocations import namespace_of, Plan
from torch_overlay._inductor.relaunch.capture.capture import Capture, Captured
from torch_overlay._inductor.relaunch.capture.recording import no_collection
from torch_overlay._inductor.relaunch.memory.arrange import arrange, Arrangement, Proven
from torch_overlay._inductor.relaunch.memory.outputs import OfInput, SameInput
from torch_overlay._inductor.relaunch.proof.nodes import Refusal, Template
from torch_overlay._inductor.relaunch.refusals import COMMUNICATION
from torch_overlay._inductor.streams.runtime import Spec


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay._inductor.relaunch.refusals import Code

ATTEMPTS = 3
# A number that happens to be an address of these captures, or a library that allocates more when it is first used.
COINCIDENCES = ("unmoved", "outside", "ambiguous", "moved", "layout")

# One capture at a time in the process: a thread that finds another one at it runs its region as compiled.
capturing = threading.Lock()


def make_graph(
    device: Any,
    model: Callable[[list[Any]], Any],
    inputs: Sequence[Any],
    alignments: Sequence[int],
    plan: Plan,
    code: Code,
) -> tuple[Arrangement, list[Any]]:
    """How a region is launched, and a launcher for each of its stages. `alignments`: to how many bytes each input is
    aligned. Raises Refusal, or what the region itself raises.
    """
    check_streams(model)
    check_collectives(model)
    namespace = namespace_of(model) or {}
    holes = device.holes() if code.saved_outputs else []
    with_uses = device.concurrent and not code.is_training

    def take(recording: Any, with_uses: bool = False) -> Captured:
        return Capture(model, inputs, alignments, plan, recording, holes, with_uses).run(code)

    with _recordings(device) as record:
        first = take(record(1), with_uses)
        for _ in range(ATTEMPTS - 1):
            if first.plan == plan:
                break
            plan = first.plan  # it has learned which allocations are outputs
            first.recording.discard()
            first = take(record(1), with_uses)
        second = take(record(2))
        try:
            graph, template = _prove(device, first, second, namespace)
        except Refusal as refusal:
            if refusal.reason not in COINCIDENCES:
                raise
            elsewhere = record(3)  # while theirs are taken: the same number must not be an address again
            first.recording.discard()
            second.recording.discard()
            first, second = take(elsewhere, with_uses), take(record(5))
            graph, template = _prove(device, first, second, namespace)
        with no_collection():
            second.recording.discard()
            edges = device.relax(first, graph, template, namespace)
            arrangement = arrange(_proven(first, second, template, edges, inputs, plan.dying, code))
            return device.instantiate(first, arrangement)


@contextlib.contextmanager
def _recordings(device: Any) -> Iterator[Callable[[int], Any]]:
    """Makes recordings, and closes all that were made."""
    made: list[Any] = []

    def record(gap: int) -> Any:
        made.append(device.record(gap))
        return made[-1]

    try:
        yield record
    finally:
        for recording in made:
            recording.close()


def _prove(device: Any, first: Captured, second: Captured, namespace: dict[str, Any]) -> tuple[Any, Template]:
    """The graph of the first capture, and its template."""
    if first.layout != second.layout or first.places != second.places:
        raise Refusal("layout", "two captures of the region differ in their outputs or in their scratch memory")
    with no_collection():
        return device.prove(first, second, namespace)


def _proven(
    first: Captured,
    second: Captured,
    template: Template,
    edges: tuple[tuple[int, int], ...],
    inputs: Sequence[Any],
    dying: frozenset[int],
    code: Code,
) -> Proven:
    layout = first.layout
    storages = [inputs[k].untyped_storage() for k in layout.inputs]
    addresses = [storage.data_ptr() for storage in storages]
    holders = {address: k for k, address in reversed(list(enumerate(addresses)))}
    returned = {r.input for r in layout.recipes if isinstance(r, (SameInput, OfInput))}
    return Proven(
        layout,
        template,
        edges,
        first.places,
        tuple(a.either(b) for a, b in zip(first.lives, second.lives, strict=True)),
        holders=tuple([holders[address] for address in addresses]),
        held=tuple(storage.nbytes() for storage in storages),
        static=frozenset(r for r, k in enumerate(layout.inputs) if k not in dying or k in returned),
        stages=code.is_backward and not first.recording.fixed,
    )


def check_streams(model: Any) -> None:
    """A partition orders its side streams against the caller's stream alone, and what it owes to other streams is
    done around it. A graph that is not partitioned does both itself."""
    namespace = namespace_of(model) or {}
    for name in _names_in(model):
        spec = getattr(namespace.get(name), "spec", None)
        if isinstance(spec, Spec) and (spec.objects or _orders_others(spec)):
            message = (
                "it has to order the caller's streams; torch._inductor.config.graph_partition = True splits that off"
            )
            raise Refusal("streams", message)


def _orders_others(spec: Spec) -> bool:
    """At its exit, a side stream has to wait; or at its entry, it is asked for its state."""
    waits = any(k != "record" and not isinstance(spec.streams[stream], str) for k, _, stream in spec.exit)
    return waits or any(k == "record_entry" for k, *_ in spec.entry)


def check_collectives(model: Any) -> None:
    """Note [Collectives] of `policy`. Code from a cache may have been compiled for other graphs than ours."""
    if found := set(_names_in(model)).intersection(COMMUNICATION):
        message = f"it contains collectives ({', '.join(sorted(found))}), and was compiled to keep them inside"
        raise Refusal("collective", f"{message}; torch._inductor.config.force_disable_caches compiles it anew")


def _names_in(model: Any) -> tuple[str, ...]:
    code = getattr(getattr(model, "__func__", model), "__code__", None)
    return code.co_names if code is not None else ()
