"""Has FX passes keep the placement of nodes, and updates of parts in place (seams)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.streams import fx_passes, scatters_in_place
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch.fx import Graph, Node
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    from torch_overlay._inductor.streams.pass_log import PassLog


def observer_init(original: Callable[..., None], observer: GraphTransformObserver, *args: Any, **kwargs: Any) -> None:
    override(observer, __enter__=begin_pass, __exit__=end_pass, apply_graph_pass=apply_graph_pass)
    original(observer, *args, **kwargs)


def begin_pass(original: Callable[..., Any], observer: GraphTransformObserver) -> Any:
    if handles_streams() and (log := fx_passes.begin_pass(observer.gm)) is not None:
        observer._overlay_log = log  # type: ignore[attr-defined]
    return original(observer)


def end_pass(
    original: Callable[..., None],
    observer: GraphTransformObserver,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    original(observer, kind, error, traceback)
    log: PassLog | None = observer.__dict__.pop("_overlay_log", None)
    if log is not None:
        fx_passes.end_pass(observer.gm, log, failed=kind is not None)


def apply_graph_pass(
    original: Callable[..., Any], observer: GraphTransformObserver, run: Callable[[Graph], Any]
) -> Any:
    """Skip `reorder_for_locality` in a graph with streams. Upstream moves producers to just before their consumer: for
    a side stream's branch that is the latest moment at which it can be launched, after all the work that it was to run
    beside.
    """
    if observer.passname == "reorder_for_locality" and handles_streams() and fx_passes.has_streams(observer.gm.graph):
        return None
    return original(observer, run)


def common_custom_context(original: Callable[..., dict[str, Any]], nodes: Sequence[Node]) -> dict[str, Any]:
    return {**original(nodes), **fx_passes.merge_facts(nodes)}


def reinplace_inplaceable_ops_core(original: Callable[[Graph], None], graph: Graph) -> None:
    with scatters_in_place.mark_shared(graph):
        original(graph)


def scatter_always_uses_mutation(original: Callable[[Node], bool], node: Node) -> bool:
    return scatters_in_place.IN_PLACE in node.meta or original(node)
