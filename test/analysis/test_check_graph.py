"""`check_graph` on graphs made by hand: nodes, edges and addresses, no GPU."""

import struct
from typing import Any

from torch._inductor.test_case import TestCase

import form  # noqa: F401
from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    CopyNode,
    CopySide,
    EmptyNode,
    FillNode,
    FIXED,
    KernelNode,
    Segment,
)
from torch_overlay.analysis import check_graph, Report
from torch_overlay.analysis.race_check.graph_check import kernel_modes


LOW = 0x7D0000000000
STEP = 1 << 21
X, Y, SCRATCH, OUT = range(4)
NAMES = {X: "x", Y: "y", SCRATCH: "scratch", OUT: "out"}


def at(segment: int, offset: int = 0) -> int:
    return LOW + segment * STEP + offset


def segments(*regions: Any) -> tuple[Segment, ...]:
    """One of 1 KiB per region, or (region, delta)."""
    pairs = [region if isinstance(region, tuple) else (region, 0) for region in regions]
    return tuple(Segment(at(i), 1024, region, delta) for i, (region, delta) in enumerate(pairs))


def kernel(index: int, *words: int, name: str = "kernel", tail: bytes = b"") -> KernelNode:
    parameters = [(8 * i, struct.pack("<Q", word)) for i, word in enumerate(words)]
    if tail:
        parameters.append((8 * len(words), tail))
    return KernelNode(index, 100 + index, name, 1, 0, 0, (1, 1, 1), (1, 1, 1), 0, tuple(parameters))


def fill(index: int, dst: int, width: int = 256) -> FillNode:
    return FillNode(index, 100 + index, dst, 0, 4, width, 1, 0)


def copy(index: int, dst: int, src: int, width: int = 1024) -> CopyNode:
    return CopyNode(index, 100 + index, (CopySide(dst, width, 1), CopySide(src, width, 1)), width, 1, 1)


def check(nodes: Any, edges: Any, regions: Any = (X, Y, SCRATCH, OUT), **kwargs: Any) -> Report:
    graph = CapturedGraph(tuple(nodes), tuple(edges), segments(*regions), LOW, LOW + (1 << 30))
    return check_graph(graph, **{"inputs": {X, Y}, "names": NAMES, **kwargs})


class TestCheckGraph(TestCase):
    maxDiff = None

    def finds(self, report: Report, *expected: str) -> None:
        """Races, by the edges that would order them, and what is redundant."""
        found = [f"{race.kind}: {race.edge}" for race in report.races]
        self.assertEqual(found + [f"redundant: {r.what}: {r.why}" for r in report.redundant], list(expected))

    def clean(self, *args: Any, **kwargs: Any) -> None:
        report = check(*args, **kwargs)
        self.assertTrue(report.ok, str(report))

    def test_missing_edge(self) -> None:
        nodes = [kernel(0, at(X), at(SCRATCH), name="matmul"), kernel(1, at(SCRATCH), at(OUT), name="relu")]
        self.clean(nodes, [(0, 1)])
        self.assertExpectedInline(
            str(check(nodes, [])) + "\n",
            """\
WAW: scratch is written twice in no order
  first   `node 0: matmul` on branch 1 writes scratch, bytes 0 to 1023
  second  `node 1: relu` on branch 2 writes scratch, bytes 0 to 1023
  missing: a path of edges from `node 0: matmul` to `node 1: relu`
1 race, no lost promises, no redundant events
""",
        )

    def test_diamond(self) -> None:
        nodes = [
            kernel(0, at(X), at(2)),
            kernel(1, at(2), at(3)),
            kernel(2, at(2), at(4)),
            kernel(3, at(3), at(4), at(5)),
        ]
        regions = (X, Y, (SCRATCH, 0), (SCRATCH, 1024), (SCRATCH, 2048), OUT)
        self.clean(nodes, [(0, 1), (0, 2), (1, 3), (2, 3)], regions)
        for missing in [(0, 1), (0, 2), (1, 3), (2, 3)]:
            edges = [edge for edge in [(0, 1), (0, 2), (1, 3), (2, 3)] if edge != missing]
            self.assertFalse(check(nodes, edges, regions).ok, str(missing))

    def test_scratch_memory_that_two_branches_share(self) -> None:
        """Two allocations lie at the same place of the slab, for the host freed one before it asked for the other."""
        nodes = [kernel(0, at(X), at(1), name="left"), kernel(1, at(X), at(2), name="right")]
        self.finds(
            check(nodes, [], (X, (SCRATCH, 0), (SCRATCH, 512))),
            "WAW: a path of edges from `node 0: left` to `node 1: right`",
        )
        self.clean(nodes, [(0, 1)], (X, (SCRATCH, 0), (SCRATCH, 512)))
        self.clean(nodes, [], (X, (SCRATCH, 0), (SCRATCH, 1024)))

    def test_memset_beside_its_reader(self) -> None:
        nodes = [fill(0, at(SCRATCH)), kernel(1, at(SCRATCH), at(OUT), name="split_k")]
        self.finds(check(nodes, []), "WAW: a path of edges from `node 0: memset` to `node 1: split_k`")
        self.clean(nodes, [(0, 1)])

    def test_copies_of_rows(self) -> None:
        """Left and right half of the same rows."""
        left = CopyNode(0, 0, (CopySide(at(OUT), 128, 4), CopySide(at(X), 128, 4)), 64, 4, 1)
        right = CopyNode(1, 1, (CopySide(at(OUT, 64), 128, 4), CopySide(at(X, 64), 128, 4)), 64, 4, 1)
        self.clean([left, right], [])
        wide = CopyNode(1, 1, (CopySide(at(OUT, 32), 128, 4), CopySide(at(X, 32), 128, 4)), 64, 4, 1)
        self.assertEqual([r.kind for r in check([left, wide], []).races], ["WAW"])

    def test_inputs_are_read_side_by_side(self) -> None:
        nodes = [kernel(0, at(X), at(SCRATCH)), kernel(1, at(X), at(OUT))]
        self.clean(nodes, [])

    def test_mutated_input(self) -> None:
        nodes = [kernel(0, at(X), at(SCRATCH), name="read"), kernel(1, at(X), name="update")]
        self.assertEqual([r.kind for r in check(nodes, [], mutated={X}).races], ["RAW"])
        self.clean(nodes, [(0, 1)], mutated={X})

    def test_order_by_way_of_an_empty_node(self) -> None:
        nodes = [kernel(0, at(X), at(SCRATCH)), EmptyNode(1, 101), kernel(2, at(SCRATCH), at(OUT))]
        self.clean(nodes, [(0, 1), (1, 2)])

    def test_fixed_memory_is_read(self) -> None:
        nodes = [kernel(0, at(0), at(1)), kernel(1, at(0), at(2))]
        self.clean(nodes, [], (FIXED, SCRATCH, OUT))

    def test_pointer_inside_of_a_packed_block(self) -> None:
        block = struct.pack("<IQI", 7, at(SCRATCH, 16), 9)
        nodes = [kernel(0, at(X), at(SCRATCH), name="make"), kernel(1, tail=block, name="nvjet")]
        (race,) = check(nodes, []).races
        self.assertEqual(str(race.second.view), "scratch, bytes 16 to 1023")

    def test_what_kernels_do_where_it_is_known(self) -> None:
        """Two later writers of one output: only their signatures tell."""
        nodes = [
            kernel(0, at(OUT), name="zero"),
            kernel(1, at(X), at(OUT), name="add"),
            kernel(2, at(Y), at(OUT), name="add"),
        ]
        edges = [(0, 1), (0, 2)]
        self.clean(nodes, edges)
        report = check(nodes, edges, kernels={"add": "ru"})
        self.assertEqual(
            [(r.kind, r.edge) for r in report.races], [("RAW", "a path of edges from `node 1: add` to `node 2: add`")]
        )

    def test_edges_that_others_imply(self) -> None:
        nodes = [kernel(0, at(X), at(SCRATCH)), kernel(1, at(SCRATCH)), kernel(2, at(SCRATCH), at(OUT))]
        report = check(nodes, [(0, 1), (1, 2)])
        self.assertEqual(report.redundant, [])
        nodes.append(kernel(3, at(OUT)))
        report = check([*nodes], [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)])
        self.assertEqual([r.what for r in report.redundant], [])  # 0 and 3 are of one branch

    def test_two_branches_and_a_redundant_edge(self) -> None:
        nodes = [kernel(0, at(X), at(SCRATCH)), kernel(1, at(SCRATCH)), kernel(2, at(Y)), kernel(3, at(SCRATCH))]
        report = check(nodes, [(0, 1), (2, 3), (1, 3), (0, 3)])
        self.finds(report, "redundant: edge from node 0 to node 3: what it orders is ordered without it")

    def test_edges_to_nowhere_and_cycles(self) -> None:
        with self.assertRaisesRegex(ValueError, "edge 0 -> 7 names node 7, which the graph doesn't have"):
            check([kernel(0, at(X))], [(0, 7)])
        with self.assertRaisesRegex(ValueError, r"nodes \[0, 1\] are in a cycle"):
            check([kernel(0, at(X)), kernel(1, at(X))], [(0, 1), (1, 0)])

    def test_signature_of_another_length(self) -> None:
        with self.assertRaisesRegex(ValueError, r"kernels\['kernel'\] has 3 letters, node 0 has 1 parameters"):
            check([kernel(0, at(X))], [], kernels={"kernel": "rrw"})

    def test_long_chains_are_read_fast(self) -> None:
        nodes = [kernel(i, at(SCRATCH)) for i in range(2000)]
        self.clean(nodes, [(i, i + 1) for i in range(1999)])


class TestKernelModes(TestCase):
    def test_generated_kernels(self) -> None:
        source = """
@triton_heuristics.pointwise(size_hints={'x': 4096}, inductor_meta={'mutated_arg_names': ['in_out_ptr0']})
@triton.jit
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):
    tl.store(in_out_ptr0 + (x0), tmp2, None)
"""
        self.assertEqual(kernel_modes(source), {"triton_poi_fused_add_0": "urw-"})
