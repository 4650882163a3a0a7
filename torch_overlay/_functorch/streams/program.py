"""Walk the user's stream program: what each node's stream has waited for, and what was ordered after each node.

`Program` makes two vector-clock walks over the operations of one graph, in program order; `placement` writes their
results on nodes. Two kinds of copies order work though nobody wrote a wait: a copy between two GPUs (Note [Copies
between GPUs are two waits]), and a copy between host and device for which the host waits (Note [Copies that block the
host]).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.facts import ExitWait
from torch_overlay._functorch.streams.fx import (
    blocks_host,
    constants,
    COPIES,
    DEALLOC,
    device_of,
    is_backward,
    is_stream_op,
    node_stream,
    RECORD,
    RECORD_STREAM,
    SYNCHRONIZE,
    WAITS,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, callers_stream_index
from torch_overlay._functorch.streams.tokens import (
    blocking_copy,
    caller_event,
    record,
    state,
    streams_of,
    synchronization,
)


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay.frame_facts import FrameFacts


# Note [Copies between GPUs are two waits]
# PyTorch runs a copy between GPUs on the stream that is current on the source's device. That stream first waits for the
# one that is current on the destination's device, which waits for it afterwards. So a copy is two waits of the user's
# stream program, and code after the call may rely on them. Which stream is current on a device follows from where the
# node was placed: on a stream of that device, or else the device's current stream is the one of the frame's caller.


class PeerCopies:
    """Finder of a graph's copies between two GPUs, with their streams, as indices of the registry."""

    def __init__(self, frame: FrameFacts) -> None:
        streams = [i for i in frame.objects if i.kind == "stream" and i.device is not None]
        self.devices = {i.index: i.device.index for i in streams if i.device is not None}
        self.callers_stream = {
            i.device.index: i.index for i in streams if i.origin == "current" and i.device is not None
        }

    def current(self, device: int, node: Node) -> int:
        stream = node_stream(node)
        if stream and self.devices.get(stream) == device:
            return stream
        return self.callers_stream.get(device, callers_stream_index(device))  # if no operation of the user's names it

    def ends(self, node: Node) -> tuple[int, int] | None:
        """Return the streams that are current on the devices of the source and of the result; None for a node that is
        no copy between GPUs.
        """
        target = device_of(node)
        if node.target not in COPIES or target is None or target.type != "cuda":
            return None
        sources = (device for n in node.all_input_nodes if (device := device_of(n)) is not None)
        source = next((d for d in sources if d.type == "cuda" and d.index != target.index), None)
        return None if source is None else (self.current(source.index, node), self.current(target.index, node))


_streams = torch.ops.streams
_HOST = synchronization(-1)  # the host, among the places of waits


def _observed_events(ops: Sequence[Node], frame: FrameFacts) -> set[int]:
    """Return the events whose record is visible outside: the caller holds them, or the host reads them here."""
    observed = {info.index for info in frame.objects if info.escapes}
    for node in ops:
        reads_events = node.target is _streams.synchronize_event.default or "event" in str(node.target)
        if (reads_events or "elapsed_time" in str(node.target)) and node.target not in (RECORD, *WAITS, DEALLOC):
            observed.update(arg for arg in node.args if isinstance(arg, int))
    return observed


class Program:
    """The stream operations of one graph in program order, and the tokens that they give each node."""

    def __init__(self, nodes: Sequence[Node], frame: FrameFacts) -> None:
        self.nodes = nodes
        self.ops = [n for n in self.nodes if is_stream_op(n)]
        self.observed = _observed_events(self.ops, frame)
        copies = PeerCopies(frame)
        ends = {n: ends for n in nodes if (ends := copies.ends(n)) is not None}
        self.peers = {n: tuple(map(state, streams)) for n, streams in ends.items()}  # (source's stream, result's)
        self.tokens: dict[Node, Token] = {}
        self.streams = {node_stream(n) for n in self.nodes} | {CALLERS_STREAM}
        for node in self.ops:  # streams that are only named count: a copy that blocks the host orders them
            named = {state(node.args[1])} if node.target in (RECORD, RECORD_STREAM) else set()  # type: ignore[arg-type]
            self.streams |= streams_of(named.union(*self.waits(node)))
        records: dict[int, int] = defaultdict(int)
        synchronizations, blocking = itertools.count(), itertools.count()
        for node in self.nodes:
            if node.target is RECORD:
                event: Any = node.args[0]
                self.tokens[node] = record(event, records[event])
                records[event] += 1
            elif node.target in SYNCHRONIZE:
                self.tokens[node] = synchronization(next(synchronizations))
            elif blocks_host(node):
                self.tokens[node] = blocking_copy(next(blocking))

    def keeps(self, node: Node) -> bool:
        """True if the operation stays in the graph, because the outside can see it."""
        if node.target is RECORD:
            return node.args[0] in self.observed
        return node.target not in (*WAITS, DEALLOC)

    def waits(self, node: Node) -> list[tuple[Token, Token]]:
        """Return the waits of a node: of a stream, or of the host, for a stream or an event. Streams and events are
        given by the tokens of their states at the entry.
        """
        target: Any = node.target
        args: Any = node.args
        if target is _streams.wait_event.default:
            return [(state(args[1]), caller_event(args[0]))]
        if target is _streams.wait_stream.default:
            return [(state(args[0]), state(args[1]))]
        if target is _streams.synchronize_event.default:
            return [(_HOST, caller_event(args[0]))]
        if target is _streams.synchronize_stream.default:
            return [(_HOST, state(args[0]))]
        if target is _streams.synchronize_device.default:
            return [(_HOST, state(stream)) for stream in self.streams]
        if node in self.peers:
            source, made = self.peers[node]
            return [(source, made), (made, source)]
        return [(_HOST, state(node_stream(node)))] if blocks_host(node) else []

    def after(self) -> tuple[dict[Node, frozenset[Token]], tuple[ExitWait, ...]]:
        """Return the caller's states that each node's stream has waited for when the node is issued, and those that
        each stream has waited for in the end.
        """
        # All launches come after what the host has waited for.
        clock: dict[Token, frozenset[Token]] = {_HOST: frozenset()}
        found: dict[Node, frozenset[Token]] = {}
        learnt: dict[Token, frozenset[Token]] = {}

        def reached(place: Token) -> frozenset[Token]:
            known = clock.get(place, frozenset((place,)))
            return known if place.stream is None else known | clock[_HOST]

        for node in self.nodes:
            args: Any = node.args
            waits, own = self.waits(node), state(node_stream(node))
            waited = {place: reached(place) for _, place in waits}
            if node.target is RECORD:
                found[node] = reached(state(args[1])) - {state(args[1])}
                clock[caller_event(args[0])] = reached(state(args[1]))
            elif node.target is _streams.synchronize_event.default:
                found[node] = frozenset(waited).difference(clock)
            elif node.target is _streams.synchronize_stream.default:
                found[node] = waited[state(args[0])] - {state(args[0])}
            elif node.target is _streams.synchronize_device.default:
                found[node] = frozenset(waited)
            elif node.op == "call_function" and node.target not in WAITS:
                found[node] = frozenset().union(*map(reached, self.peers.get(node, (own,)))) - {own}
                if blocks_host(node):
                    learnt[self.tokens[node]] = reached(own) - clock[_HOST]
            for waiting, place in waits:
                clock[waiting] = clock.get(waiting, frozenset((waiting,))) | waited[place]
        streams = self.streams | streams_of(clock)
        known = {stream: clock.get(state(stream), frozenset()) - {state(stream)} for stream in streams}
        ends: list[tuple[int, frozenset[Token], Token | None]] = [(s, tokens, None) for s, tokens in known.items()]
        for copy, states in learnt.items():
            ends += [(stream, states - {state(stream)} - known[stream], copy) for stream in self.streams]
        exit_waits = [ExitWait(stream, tuple(sorted(tokens)), copy) for stream, tokens, copy in ends if tokens]
        return found, tuple(sorted(exit_waits, key=lambda end: (end.stream, end.tokens, end.unless or ())))

    def promised_to(self) -> dict[Node, frozenset[Token]]:
        """Return what the user has ordered after each node by the end of the graph."""
        promised: dict[Token, frozenset[Token]] = defaultdict(frozenset)  # to streams and events
        found: dict[Node, frozenset[Token]] = {}
        for node in reversed(self.nodes):
            args: Any = node.args
            if node.target is RECORD:
                event, stream = caller_event(args[0]), state(args[1])
                promised[stream] |= promised.pop(event, frozenset())
                found[node] = promised[stream] - {stream}
                if self.keeps(node):
                    promised[stream] |= {self.tokens[node]}
            elif node.op == "call_function" and node.target not in (*WAITS, *SYNCHRONIZE):
                own = state(node_stream(node))
                # All later launches come after the copy; if it is left out, those on the streams known here do.
                if blocks_host(node):
                    promised[own] = promised[own].union(*({s, *promised[s]} for s in map(state, self.streams)))
                found[node] = frozenset().union(*({s, *promised[s]} for s in self.peers.get(node, (own,)))) - {own}
            for waiting, place in self.waits(node):
                promised[place] |= {self.tokens[node]} if waiting is _HOST else {waiting, *promised[waiting]}
        return found


# Note [Copies that block the host]
# A program may rely on such a copy: all that the host launches later comes after it. The compiler may leave a copy out,
# and one operation on lists may be several copies, of which only some are between host and device. Where a copy may be
# left out, its wait is kept (`keep_waits`), and lists are split into single copies (`split_lists`).


KEPT_WITH_WAITS = ("custom", "stack_trace", "partitioner_tag", "seq_nr")  # in `meta`, of what the host waits for

_aten = torch.ops.aten


def _is_number(node: Node) -> bool:
    """True for the upload of a single value, such as a learning rate: nobody takes it for a synchronisation."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.dim() == 0


def orders_by_blocking(nodes: Sequence[Node], frame: FrameFacts) -> bool:
    """True if the host learns from a copy that all work before it is done, in a program that may launch on another
    stream afterwards, in another frame.
    """
    return frame.program_has_streams and any(blocks_host(n) and not _is_number(n) for n in nodes)


def keep_waits(graph: Graph, frame: FrameFacts) -> None:
    """Insert a host wait where a copy that blocks the host may be left out: a copy that nobody reads, or one of a
    constant. The streams of this graph are ordered as if after the copy (`Program.after`). Before a graph break and
    after it there may be other streams, so the host waits for the copy's stream.
    """
    if not (frame.goes_on or frame.is_resumed):
        return
    read: set[Any] = set()
    known = constants(graph)
    for node in reversed(graph.nodes):
        if is_stream_op(node) or node.op != "call_function":
            read.update(node.all_input_nodes)
            continue
        is_read = node in read or node.is_impure()
        # `copy` takes no more than the layout from the tensor that it overwrites.
        sources = node.args[1:2] if node.target is _aten.copy.default else node.all_input_nodes
        if is_read:
            read.update(sources)
        is_left_out = not is_read or (known.issuperset(sources) and not _is_number(node))
        if blocks_host(node) and not is_backward(node) and is_left_out:
            with graph.inserting_before(node):
                wait = graph.call_function(_streams.synchronize_stream.default, (node_stream(node),))
            wait.meta = {key: node.meta[key] for key in KEPT_WITH_WAITS if key in node.meta}


def split_lists(graph: Graph) -> None:
    """Split `_foreach_copy_` between host and device into single copies, one after the other, as eager does."""
    for node in graph.find_nodes(op="call_function", target=_aten._foreach_copy.default):
        targets, sources, *waits = node.args
        devices = {value.meta["val"].device.type for value in (*targets, *sources)}
        if len(devices) == 1:
            continue
        given = (node.kwargs["non_blocking"],) if "non_blocking" in node.kwargs else tuple(waits)
        made = []
        with graph.inserting_before(node):
            for target, source, value in zip(targets, sources, node.meta["val"]):
                made.append(graph.call_function(_aten.copy.default, (target, source, *given)))
                made[-1].meta = {**node.meta, "val": value}
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
