"""Find the races of a captured CUDA graph (`check_graph`) from its nodes and edges; nothing runs.

    graph = relaunch.graph.read.read(raw_graph, segments, low, high, driver=Driver())
    print(check_graph(graph, inputs={0, 1}, names={0: "x", 1: "weight", 2: "scratch"}))

Two nodes that no path of edges connects may run at the same time. The memory that a node accesses follows from its
parameters, as in `proof.prove`: a word (8 bytes) whose value lies in a segment of the capture is a pointer to bytes of
a region, and the kernel may access the region from there to the end of that segment. If two segments share bytes of one
region (reused scratch memory), only the order of the nodes keeps their uses apart.

The graph doesn't say if a kernel reads or writes through a pointer. Memset and memcpy nodes are known, and for
generated Triton kernels `kernel_modes(source)` knows. For other kernels, one fact is certain: memory that the graph
allocates holds nothing before its first user, so a node that no other user of the memory precedes writes it. Later
users are assumed to read, and so are all users of `inputs`, except users of `mutated`, which are assumed to update. So
the check misses a race between two later writers if their kernels are unknown.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from typing import Any, TYPE_CHECKING

from torch_overlay import orders
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, CopyNode, FillNode, FIXED, KernelNode, Segment
from torch_overlay._inductor.relaunch.proof.prove import AddressMap
from torch_overlay.analysis.race_check.happens_before import analyse
from torch_overlay.analysis.race_check.race_report import Report
from torch_overlay.analysis.race_check.trace import Access, Alloc, ByteSpan, Launch, Memory, Record, Trace, View, Wait


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torch_overlay._inductor.relaunch.proof.nodes import Node

READ, WRITE, UPDATE = "r", "w", "u"


@dataclasses.dataclass(frozen=True)
class Touch:
    """A range of bytes of a region that a node may access through a segment. `mode` is "" if it isn't known."""

    node: int
    region: int
    segment: Segment
    span: ByteSpan
    mode: str


def check_graph(
    raw_graph: Any,
    *,
    segments: Iterable[Segment] = (),
    low: int = 0,
    high: int = 0,
    inputs: Collection[int] = (),
    mutated: Collection[int] = (),
    names: Mapping[int, str] | None = None,
    kernels: Mapping[str, str] | None = None,
) -> Report:
    """Return a report with the races of a captured graph; `redundant` lists the edges that order nothing.

    `raw_graph` is a `CapturedGraph`, or a `torch.cuda.CUDAGraph(keep_graph=True)` after its capture, which is read with
    `segments`, `low` and `high`. `inputs` are the regions that hold data before the graph is launched, `mutated` those
    that the graph updates; `names` maps regions to names. `kernels` maps a kernel's name to a string with a letter for
    each parameter: "r" read, "w" written, "u" both, "-" no pointer, "?" unknown.
    """
    if isinstance(raw_graph, CapturedGraph):
        graph = raw_graph
    else:
        from torch_overlay._inductor.relaunch.graph.driver import Driver
        from torch_overlay._inductor.relaunch.graph.read import read

        graph = read(raw_graph, segments, low, high, driver=Driver())
    order = _order(graph)
    before = orders.all_before(order, orders.directly_after(order, graph.edges))
    touches = list(_touches(graph, kernels or {}))
    modes = dict(_modes(touches, order, before, set(inputs) | {FIXED}, set(mutated)))
    trace = _trace(graph, order, modes, names or {})
    found = analyse(trace.operations)
    races = [
        dataclasses.replace(
            race, edge=f"a path of edges from `{race.first.launch.name}` to `{race.second.launch.name}`"
        )
        for race in found.races
    ]
    redundant = [dataclasses.replace(r, what=r.site, site="") for r in found.redundant if r.site.startswith("edge")]
    return Report(races, redundant, traces=[trace])


def _order(graph: CapturedGraph) -> list[int]:
    """Return the nodes in topological order; of several ready nodes, the lowest number comes first."""
    known = sorted(node.index for node in graph.nodes)
    for first, second in graph.edges:
        for end in {first, second}.difference(known):
            raise ValueError(f"check_graph: edge {first} -> {second} names node {end}, which the graph doesn't have")
    order = orders.sort(orders.directly_after(known, graph.edges))
    if len(order) < len(known):
        raise ValueError(f"check_graph: nodes {sorted(set(known) - set(order))} are in a cycle of edges")
    return order


def _touches(graph: CapturedGraph, kernels: Mapping[str, str]) -> Iterator[Touch]:
    places = _Places(graph)
    for node in graph.nodes:
        if isinstance(node, FillNode):
            rows = ByteSpan(0, (node.height,), (node.pitch,), node.width * node.element_size)
            yield from places.touch(node.index, node.dst, WRITE, rows)
        elif isinstance(node, CopyNode):
            for side, mode in zip(node.sides, (WRITE, READ), strict=True):
                span = ByteSpan(0, (node.depth, node.height), (side.pitch * side.rows, side.pitch), node.width)
                yield from places.touch(node.index, side.address, mode, span)
        elif isinstance(node, KernelNode):
            letters = kernels.get(node.name, "")
            if letters and len(letters) != len(node.parameters):
                raise ValueError(
                    f"check_graph: kernels[{node.name!r}] has {len(letters)} letters, node {node.index} has "
                    f"{len(node.parameters)} parameters"
                )
            for number, (_, value) in enumerate(node.parameters):
                letter = letters[number] if letters else "?"
                if letter != "-":
                    yield from places.pointers(node.index, value, "" if letter == "?" else letter)


class _Places(AddressMap):
    """Maps addresses to bytes of segments."""

    def touch(self, node: int, address: int, mode: str, span: ByteSpan | None = None) -> list[Touch]:
        """Return the touch of bytes from an address on: a span of them, or all up to the end of the segment. Empty if
        the address is in no segment.
        """
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0 or address >= self.ends[at]:
            return []
        segment = self.segments[at]
        offset = address - segment.address
        span = span or ByteSpan(0, (), (), segment.size - offset)
        return [Touch(node, segment.region, segment, dataclasses.replace(span, offset=segment.delta + offset), mode)]

    def pointers(self, node: int, value: bytes, mode: str) -> Iterator[Touch]:
        """Yield a touch for each pointer in a parameter, at any multiple of 4 bytes; pointers don't overlap."""
        skip = 0
        for offset in range(0, len(value) - 7, 4):
            address = int.from_bytes(value[offset : offset + 8], "little")
            if offset >= skip and (found := self.touch(node, address, mode)):
                skip = offset + 8
                yield from found


def _modes(
    touches: list[Touch], order: list[int], before: list[int], inputs: Collection[int], mutated: Collection[int]
) -> Iterator[tuple[Touch, str]]:
    position = {index: at for at, index in enumerate(order)}
    users: dict[Segment, int] = {}
    for touch in touches:
        users[touch.segment] = users.get(touch.segment, 0) | 1 << position[touch.node]
    for touch in touches:
        mode = touch.mode
        if not mode:
            if touch.region in mutated:
                mode = UPDATE
            elif touch.region in inputs or users[touch.segment] & before[position[touch.node]]:
                mode = READ
            else:
                mode = WRITE
        yield touch, mode


def _trace(graph: CapturedGraph, order: list[int], modes: Mapping[Touch, str], names: Mapping[int, str]) -> Trace:
    """Return the graph as a trace: a stream for each chain of nodes, and an event for each edge between two chains."""
    trace = Trace()
    memories: dict[int, Memory] = {}
    for region in sorted({segment.region for segment in graph.segments}):
        name = names.get(region, "fixed memory" if region == FIXED else f"region {region}")
        size = max(s.delta + s.size for s in graph.segments if s.region == region)
        memories[region] = Memory(name, size, "the graph's launch")
        trace.add(Alloc(memories[region]))
    accesses: dict[int, dict[View, str]] = {index: {} for index in order}
    for touch, mode in modes.items():
        mine, view = accesses[touch.node], View(memories[touch.region], touch.span)
        mine[view] = mode if mine.get(view, mode) == mode else UPDATE
    nodes: dict[int, Node] = {node.index: node for node in graph.nodes}
    sources = orders.directly_after(order, ((second, first) for first, second in graph.edges))
    last: dict[str, int] = {}  # chain -> its last node
    chain: dict[int, str] = {}
    followed = {first for first, _ in graph.edges}
    position = {index: at for at, index in enumerate(order)}
    for index in order:
        mine = next((chain[s] for s in sources[index] if last[chain[s]] == s), None)
        chain[index] = mine or f"branch {len(last) + 1}"
        last[chain[index]] = index
        for source in sorted(sources[index], key=position.__getitem__, reverse=True):  # the last source implies most
            if chain[source] != chain[index]:
                trace.add(Wait(f"node {source}", chain[index], f"edge from node {source} to node {index}"))
        touched = tuple(
            Access(view, mode in (READ, UPDATE), mode in (WRITE, UPDATE)) for view, mode in accesses[index].items()
        )
        trace.add(Launch(f"node {index}: {nodes[index].name}", chain[index], touched))
        if index in followed:
            trace.add(Record(f"node {index}", chain[index]))
    return trace


_SIGNATURE = re.compile(r"@triton\.jit\s+def (\w+)\((.*?)\):", re.DOTALL)


def kernel_modes(source: str) -> dict[str, str]:
    """Return the letters of the Triton kernels of a generated module, for `check_graph(kernels=...)`. Constants are no
    parameters of a launch; a parameter of which nothing is known is "?".
    """
    found = {}
    for body in re.split(r"(?=@triton\.jit)", source)[1:]:
        match = _SIGNATURE.match(body)
        if match is None:
            continue
        stored = set(re.findall(r"tl\.(?:store|atomic_\w+)\(\s*(\w+)", body))
        letters = []
        for parameter in filter(None, (p.strip() for p in match[2].split(","))):
            name, _, kind = (part.strip() for part in parameter.partition(":"))
            if "constexpr" in kind:
                continue
            if name.startswith("in_out_ptr"):
                letters.append(UPDATE)
            elif "out_ptr" in name or name in stored:
                letters.append(WRITE if re.fullmatch(r"out_ptr\d+", name) else UPDATE)
            elif "ptr" in name:
                letters.append(READ)
            else:
                letters.append("-" if re.search(r"numel|^ks\d|seed|offset", name) else "?")
        found[match[1]] = "".join(letters)
    return found


__all__ = ["check_graph", "kernel_modes"]
