"""Read the planner's input from Inductor's final schedule.

`RegionReader` reads what each scheduler node touches after fusion and reordering, where it was placed, and which
boundary tokens its FX origins carry, and makes plain data of it for `plan_streams`. Names follow storage: a mutation
writes the buffer that it mutates, a slice of a concatenation is a view of the buffer that owns the memory, an output of
a multi-output kernel shares the kernel's storage.

A node on the CPU is an operation of the host: it waits for the device by a host synchronisation, and an operation that
is launched later is thereby ordered after it. A node that reads device memory from the CPU side (a copy to the host,
`.item()`) runs on its stream.

Read the boundary tokens of a region's nodes from the FX nodes that they compute: the order between the region and
its caller.

Inductor's origins also name the nodes that produced an operation's inputs, on whatever stream; the tokens of those
nodes belong to the operations that compute them. So the nodes of a region are read in their order, and each is noted
(`note_origins`) before the next is read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal, TYPE_CHECKING

from torch._inductor import ir, scheduler as sched
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import is_view
from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM, callers_stream_index
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, state, streams_of
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import (
    fx_origins,
    is_gpu,
    is_part,
    kernel_of,
    owner_of,
    parts_of,
    stream_operation,
    updated_by_call,
    user_stream,
    viewed_by_call,
)
from torch_overlay._inductor.streams.graph_facts import (
    exit_waits,
    private_streams,
    required,
    stream_devices,
)
from torch_overlay._inductor.streams.parts import accesses, PartAccess, parts
from torch_overlay._inductor.streams.plan import HOST, Op


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.streams.facts import ForeignRead
    from torch_overlay._functorch.streams.tokens import Token


Kind = Literal["after", "promised_to"]


class BoundaryTokens:
    """Reads the tokens of a region's nodes. A node whose FX origins lost theirs in some pass gets all tokens of its
    stream.

    `enclosed` regions order themselves against the caller's stream alone: each side stream forks from it at the entry
    and joins it at the exit. A region must be `enclosed` inside a captured graph, and where the rest of the user's
    program runs in other regions.
    """

    def __init__(self, scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode], enclosed: bool) -> None:
        self.scheduler, self.enclosed = scheduler, enclosed
        self.concerned: set[int] = set()  # user streams that an enclosed region runs on, or that come after it
        self.origins: dict[str, set[torch.fx.Node]] = {}  # buffer -> FX nodes that went into it
        # The current stream of another device is registered under a number of its own; here it has the number of that
        # device.
        self.numbers = {
            i.index: callers_stream_index(i.device.index or 0)
            for i in frame_facts.current().objects
            if i.origin == "current" and i.index != CALLERS_STREAM and i.device is not None
        }
        # Private streams are made by the frame, and nobody else sees them: at the entry of a forward they hold no work,
        # and nobody asks for their state at the exit. In a backward they hold the work that the forward launched there.
        self.private = set() if V.graph.is_backward else private_streams()
        self.of_stream: dict[Kind, dict[int, set[Token]]] = {"after": defaultdict(set), "promised_to": defaultdict(set)}
        for node in nodes:
            for kind, known in self.of_stream.items():
                known[user_stream(scheduler, node)].update(self.of_node(node, kind) or ())

    def number(self, stream: int) -> int:
        return self.numbers.get(stream, stream)

    def renumbered(self, tokens: Iterable[Token]) -> set[Token]:
        return {t if t.stream is None else state(self.number(t.stream)) for t in tokens}

    def note_origins(self, node: BaseSchedulerNode) -> None:
        origins = set(fx_origins(node))
        self.origins.update((name, origins) for name in node.get_buffer_names())

    def own_origins(self, node: BaseSchedulerNode) -> list[torch.fx.Node]:
        """Return the FX nodes that this operation computes itself.

        A node that was inlined here and elsewhere counts for both operations, if it reads the caller's memory in both.
        A buffer that an operator realizes for itself, and the first half of a split reduction, name the operator as
        their origin, too: both operations have its tokens and reads, then.
        """
        reads = {d.name for d in node.read_writes.reads}
        inherited = set().union(*(self.origins.get(name, set()) for name in reads))
        every = list(fx_origins(node))
        own = [
            n
            for n in every
            if n not in inherited or any(a.op == "placeholder" and a.name in reads for a in n.all_input_nodes)
        ]
        return own or every

    def of_node(self, node: BaseSchedulerNode, kind: Kind) -> set[Token] | None:
        """Return the tokens of the operation; None if no pass has kept any for it."""
        own = self.own_origins(node)
        # A view launches nothing: its tokens are not tokens of the kernel that reads through it.
        launched = [n for n in own if not is_view(n) and n.target is not operator.getitem] or own
        known = [tokens for n in launched if (tokens := getattr(fact_of(n), kind)) is not None]
        if known or any(getattr(fact_of(origin), kind) is not None for origin in fx_origins(node)):
            return set().union(*map(self.renumbered, known))
        return None

    def of_launch(self, node: BaseSchedulerNode, stream: int) -> tuple[frozenset[Token], frozenset[Token]]:
        """Return what an operation on a stream of the device comes after, and what comes after it."""
        user = user_stream(self.scheduler, node)
        before = self.of_node(node, "promised_to")
        before = self.of_stream["promised_to"][user] if before is None else before
        if self.enclosed:
            token = frozenset(() if callers_device(stream) is not None else (CALLER,))
            self.concerned |= {user, *streams_of(before)}
            # A record, a synchronisation or a copy that blocks may stand in the same region.
            kept = frozenset(t for t in before if t.stream is None)
            return token, token | kept
        after = self.of_node(node, "after")
        after = self.of_stream["after"][user] if after is None else after
        own = {state(stream), *map(state, self.private)}
        return frozenset(after - own), frozenset(before - own)

    def foreign_reads(self, node: BaseSchedulerNode) -> set[ForeignRead] | None:
        """Return the operation's reads of other streams' memory in eager, with the numbers that streams have here; None
        if no pass has kept them. A view that gets memory of its own is a read that eager doesn't have: there are none,
        then.
        """
        own = self.own_origins(node)
        known = [reads for n in own if (reads := fact_of(n).reads) is not None]
        if not known and not (own and all(map(is_view, own))):
            return None
        return {read._replace(stream=self.number(read.stream)) for reads in known for read in reads}

    def at_exit(self, blocking: Collection[Token]) -> dict[int, frozenset[Token]]:
        """Return, per stream, the caller's states that it must be ordered after when the region is left. `blocking`:
        the tokens of the copies in it that block the host.
        """
        if self.enclosed:
            return {}
        promised: dict[int, frozenset[Token]] = {}
        for stream, tokens, unless in exit_waits():
            if unless not in blocking and stream not in self.private:
                number = self.number(stream)
                known = frozenset(self.renumbered(tokens)).difference(map(state, self.private))
                promised[number] = promised.get(number, frozenset()) | known
        return promised


def _kept_outputs() -> set[str]:
    """Return the buffers that are still held when the graph's code has returned."""
    graph: Any = V.graph
    output = graph.module.graph.output_node()
    nodes = pytree.tree_leaves(output.args[0])
    return {
        buffer.get_name()
        for node, buffer in zip(nodes, graph.graph_outputs)
        if not isinstance(buffer, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer))
        and not (fact_of(node).is_dropped and nodes.count(node) == 1)
    }


class RegionReader:
    """Reads one list of scheduler nodes: a whole `call`, a graph partition, or the nodes between two partitions. For
    `enclosed` see `BoundaryTokens`.
    """

    def __init__(self, scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode], enclosed: bool) -> None:
        self.scheduler = scheduler
        self.nodes = nodes
        self.enclosed = enclosed
        self.ops: list[Op] = []
        self.index: dict[BaseSchedulerNode, int] = {}
        self.writer_streams: dict[str, list[int]] = {}
        self.allocated_on: dict[str, int] = {}  # memory that is allocated apart from its first write -> stream
        self.kernels: dict[str, int] = {}  # buffer -> stream of the kernel that makes it
        self.owners: dict[str, str] = {}  # view -> buffer whose memory it lies in
        self.fresh: dict[str, None] = {}
        returned = set(map(owner_of, _kept_outputs()))
        self.output_memory = returned.union(*(parts_of(V.graph.try_get_buffer(name)) for name in returned))
        self.devices: dict[int, int] = {}  # operation -> index of the device that it runs on
        self.order_after = ScheduleNotes.of(scheduler).awaited_stores
        self.tokens = BoundaryTokens(scheduler, nodes, enclosed)
        self.foreign_reads: dict[int, set[ForeignRead]] = {}  # of operations of which passes kept them

    # -- names

    def storage(self, name: str) -> str:
        return self.scheduler.mutation_real_name.get(name, name)

    def memory_of(self, names: Iterable[str]) -> set[str]:
        """Return the buffers in whose memory the names among an operation's reads and writes are."""
        return {owner_of(self.owners.get(name, name)) for name in names}

    def device_of(self, name: str) -> torch.device | None:
        buffer: Any = V.graph.try_get_buffer(name)
        return buffer.get_device() if buffer is not None else None

    def stream_of(self, node: BaseSchedulerNode, device: torch.device | None) -> int:
        user = user_stream(self.scheduler, node)
        if user != CALLERS_STREAM:
            return self.tokens.number(user)
        return callers_stream_index(device.index) if device is not None and device.index is not None else CALLERS_STREAM

    def promised(self) -> dict[int, frozenset[Token]]:
        """Return, per stream, the caller's states that it must be ordered after when the region is left."""
        return self.tokens.at_exit({token for op in self.ops if op.blocking for token in op.requires})

    # -- operations

    def note_outputs(self, node: BaseSchedulerNode, stream: int | None) -> None:
        for output in node.get_outputs():
            name, buffer = output.get_name(), output.node
            if stream is not None:
                for mutated in map(self.storage, output.get_mutations()):
                    if mutated in self.allocated_on:
                        self.writer_streams.setdefault(mutated, []).append(stream)
            if output.get_mutations() or buffer is None or not is_gpu(buffer.get_device()):
                continue
            layout = buffer.layout if hasattr(buffer, "layout") else None
            if isinstance(layout, ir.NoneLayout):
                continue
            if updated_by_call(buffer):
                self.owners[name] = owner_of(name)
                continue
            owner = name
            if isinstance(layout, ir.NonOwningLayout):
                owner = layout.view.get_name()
                self.owners[name] = owner
            self.fresh[owner] = None
            if stream is not None:
                self.writer_streams.setdefault(owner, []).append(stream)
            elif isinstance(node, sched.NopKernelSchedulerNode) and not node.read_writes.reads:  # `torch.empty`
                self.allocated_on[owner] = self.stream_of(node, buffer.get_device())

    def launch(self, node: BaseSchedulerNode) -> Op:
        reads = {self.storage(d.name) for d in node.read_writes.reads if not isinstance(d, WeakDep)}
        writes = set()
        for output in node.get_outputs():
            writes.add(self.storage(output.get_name()))
            if not output.is_ordering_only():
                writes.update(self.storage(name) for name in output.get_mutations())
        name, device = node.get_name(), node.get_device()
        if isinstance(node, sched.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
            return Op(name, None, frozenset(reads), frozenset(writes))
        if viewed := viewed_by_call(node.node):
            return Op(name, None, frozenset(reads).union(map(self.storage, viewed)), frozenset(writes))
        aliases = {self.storage(a) for o in node.get_outputs() if not is_part(o) for a in o.get_aliases()}
        if aliases and node.is_extern():
            self.ops.append(Op(f"{name}.alias", None, frozenset(aliases), frozenset(writes)))
        # An operation of the host that reads device memory runs on the device.
        on = device if is_gpu(device) else next((d for r in sorted(reads) if is_gpu(d := self.device_of(r))), None)
        gpu, stream, blocking = on is not None, HOST, False
        if on is not None:
            stream = self.stream_of(node, on)
            self.devices[len(self.ops)] = on.index or 0
            if isinstance(node.node, ir.DeviceCopy):
                blocking = not node.node.constant_args[0] and self.blocks_host(node)
            else:
                blocking = not is_gpu(device) and isinstance(node.node, ir.DynamicScalar)
        after, before = self.tokens.of_launch(node, stream) if gpu else (frozenset(), frozenset())
        if self.enclosed and not gpu and self.reads_download(node):
            after |= {CALLER}  # the host waits for the operations of other regions
        # `after` holds for memory of the region, too: the block that is allocated here may be one that an earlier call
        # freed while another stream still read it; that read comes before the work that the user waited for.
        if gpu and (foreign := self.tokens.foreign_reads(node)) is not None:
            self.foreign_reads[len(self.ops)] = foreign
        order_after = frozenset(self.order_after.get(node, ()))
        requires = frozenset(required(node)) if blocking else frozenset()
        return Op(
            name,
            stream,
            frozenset(reads),
            frozenset(writes),
            after,
            before,
            requires,
            blocking=blocking,
            order_after=order_after,
        )

    def blocks_host(self, copy: BaseSchedulerNode) -> bool:
        """True if the copy is to the host, or uploads more than a number: a number may be passed to a kernel as an
        argument.
        """
        source: Any = copy.node.inputs[0]  # type: ignore[union-attr]
        if not is_gpu(copy.get_device()):
            return True
        return not is_gpu(source.get_device()) and bool(source.get_size())

    def reads_download(self, node: BaseSchedulerNode) -> bool:
        """True if the host reads what a copy of another region brings from the device, and the user's program hasn't
        waited for that copy.
        """
        for read in node.read_writes.reads:
            buffer = self.scheduler.name_to_buf.get(read.name)
            made = buffer.defining_op if buffer is not None else None
            if made is None or self.scheduler.name_to_fused_node[made.get_name()] in self.index:
                continue
            blocking = isinstance(made.node, ir.DeviceCopy) and not made.node.constant_args[0]
            if blocking or not any(is_gpu(self.device_of(r.name)) for r in made.read_writes.reads):
                continue
            if not self.host_has_waited(made, node):
                return True
        return False

    def host_has_waited(self, made: BaseSchedulerNode, reader: BaseSchedulerNode) -> bool:
        promised = self.tokens.of_node(made, "promised_to") or set()
        nodes = self.scheduler.nodes
        between = nodes[nodes.index(self.scheduler.name_to_fused_node[made.get_name()]) + 1 : nodes.index(reader)]
        return any(not promised.isdisjoint(required(n)) for n in between if stream_operation(n) is not None)

    def stream_program(self, node: BaseSchedulerNode, overload: torch._ops.OpOverload) -> Op:
        """Return the operation of a user's record, synchronisation or query, carried out on the host at this place."""
        kind, after = overload._opname, self.tokens.of_node(node, "after") or set()
        arguments: Any = node.node.constant_args  # type: ignore[union-attr]
        is_on_stream = kind in ("record_event", "synchronize_stream")  # the last argument
        stream = self.tokens.number(arguments[-1]) if is_on_stream else HOST
        waits = kind in ("synchronize_event", "synchronize_device")
        if kind == "synchronize_device" and len(set(stream_devices().values())) > 1:
            after = set()  # it waits for one device only
        if self.enclosed:
            # The operations that the user ordered before this are in other regions, and all join the caller's stream.
            after = (
                {CALLER} if stream not in (HOST, CALLERS_STREAM) or after and kind == "synchronize_device" else set()
            )
        return Op(
            kind,
            stream,
            writes=frozenset(self.storage(o.get_name()) for o in node.get_outputs()),
            after=frozenset(after) if stream != HOST or waits else frozenset(),
            requires=frozenset(required(node)),
            blocking=kind == "synchronize_stream",
            waits=waits,
            rerecords=caller_event(arguments[0]) if kind == "record_event" else None,
        )

    def read(self) -> None:
        for node in self.nodes:
            overload = stream_operation(node)
            if overload is not None:
                op = self.stream_program(node, overload)
                self.note_outputs(node, None)
            else:
                op = self.launch(node)
                kernel = kernel_of(node.node)
                self.note_outputs(node, op.stream if kernel is None else self.kernels.get(kernel))
                if op.stream is not None:
                    self.kernels.update(dict.fromkeys(node.get_buffer_names(), op.stream))
            self.index[node] = len(self.ops)
            self.ops.append(op)
            self.tokens.note_origins(node)
        self.name_parts()

    def name_parts(self) -> None:
        """Give disjoint ranges of a buffer names of their own (`streams.parts`), where operations on several streams
        touch them.
        """
        users: dict[str, set[int]] = {}  # buffer -> operations that launch something
        whole: set[str] = set()  # buffers that also go by other names, or may be copied
        for i, op in enumerate(self.ops):
            if op.stream is not None:
                for name in op.reads | op.writes:
                    users.setdefault(name, set()).add(i)
            elif op.reads:
                whole |= op.reads | op.writes
        graph: Any = V.graph
        # If such an input is not aligned, a copy of it is made, and written back as a whole.
        whole.update(graph.graph_input_names[i] for i in graph.inputs_to_check or ())
        found = [(i, a) for node, i in self.index.items() for a in accesses(node, self.storage)]
        for name in {a.storage for _, a in found if a.writes and a.span is not None} - whole:
            if len({self.ops[i].stream for i in users.get(name, ())}) < 2:
                continue
            mine = [(i, a) for i, a in found if a.storage == name and i in users[name]]
            mine += [(i, PartAccess(name, None, True)) for i in users[name] - {i for i, _ in mine}]
            numbers = parts([a.span for _, a in mine], [a.span for _, a in mine if a.writes])
            if numbers is None:
                continue
            touched: dict[int, set[str]] = {}
            for (i, _), own in zip(mine, numbers):
                touched.setdefault(i, set()).update(f"{name}[{n}]" for n in own)
            for i, names in touched.items():
                op = self.ops[i]
                self.owners.update(dict.fromkeys(names, name))
                reads = op.reads - {name} | names if name in op.reads else op.reads
                writes = op.writes - {name} | names if name in op.writes else op.writes
                self.ops[i] = replace(op, reads=reads, writes=writes)
