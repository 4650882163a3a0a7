# Owner(s): ["module: inductor"]

import random

import torch
from torch._inductor.cudagraph_relaunch.concurrency import (
    chain_of,
    is_product,
    NEAR,
    Product,
    relaxed,
)
from torch._inductor.cudagraph_relaunch.nodes import (
    KernelNode,
    PointerSlot,
    Segment,
    Template,
)
from torch.testing._internal.common_utils import run_tests, TestCase


INPUTS, REGIONS, BYTES = 2, 8, 4096
SEGMENTS = [Segment((1 << 40) + BYTES * r, BYTES, r) for r in range(REGIONS)]
ROOM = 100  # blocks at once


def address(region, delta=0):
    return SEGMENTS[region].address + delta


class Graph:
    """A chain of kernels. `accesses` has (letter, region) for each parameter of each
    node, `known` the nodes whose kernels are declared."""

    def __init__(self, accesses, known=None, blocks=1, edges=None):
        self.accesses = accesses
        self.known = set(range(len(accesses)) if known is None else known)
        nodes, slots, self.letters = [], [], {}
        for n, row in enumerate(accesses):
            parameters = tuple(
                (8 * i, address(region).to_bytes(8, "little"))
                for i, (_, region) in enumerate(row)
            )
            launch = (blocks, 1, 1), (32, 1, 1), 0
            nodes.append(KernelNode(n, n, "k", n + 1, 0, 0, *launch, parameters))
            slots += [PointerSlot(n, i, 0, r, 0) for i, (_, r) in enumerate(row)]
            if n in self.known:
                self.letters[n + 1] = "".join(letter for letter, _ in row)
        self.template = Template(REGIONS, tuple(nodes), tuple(slots))
        self.chain = edges or [(n, n + 1) for n in range(len(nodes) - 1)]

    def relaxed(self, *, products=(), results=(), device=(), extent=None):
        return relaxed(
            self.template,
            self.chain,
            segments=SEGMENTS,
            inputs=INPUTS,
            letters=self.letters,
            products=products,
            results=results,
            is_device_memory=lambda word: word in device,
            room=lambda node: ROOM,
            extent=lambda node: extent,
        )

    def run(self, order):
        """What every node reads. Inputs are two views of one tensor; a node that is
        not declared accesses everything."""
        memory, seen = dict.fromkeys(range(REGIONS), ()), {}
        for n in order:
            row = self.accesses[n]
            everything = [("w", region) for region in range(REGIONS)]
            used = row if n in self.known else everything
            used = [(letter, max(region, INPUTS - 1)) for letter, region in used]
            seen[n] = tuple(memory[region] for _, region in used)
            for letter, region in used:
                if letter != "r":
                    memory[region] = hash((n, seen[n]))
        return seen, memory


def earlier(node, edges):
    """The nodes from which a path of edges leads to this one."""
    found, todo = set(), {node}
    while todo:
        todo = {u for u, v in edges if v in todo} - found
        found |= todo
    return found


def some_order(rng, count, edges):
    todo = set(range(count))
    while todo:
        node = rng.choice(sorted(todo - {v for u, v in edges if u in todo}))
        todo.remove(node)
        yield node


class TestRelaxed(TestCase):
    def test_every_order_computes_the_same(self):
        rng, parted = random.Random(0), 0
        for _ in range(150):
            count = rng.randrange(2, 16)
            accesses = [
                [
                    (rng.choice("rrrwh"), rng.randrange(REGIONS))
                    for _ in range(rng.randrange(1, 4))
                ]
                for _ in range(count)
            ]
            graph = Graph(accesses, [n for n in range(count) if rng.random() < 0.9])
            edges = graph.relaxed()
            if edges is None:
                continue
            parted += 1
            for u, v in edges:  # none is implied by others
                self.assertNotIn(u, earlier(v, [e for e in edges if e != (u, v)]))
            wanted = graph.run(range(count))
            for _ in range(20):
                self.assertEqual(graph.run(some_order(rng, count, edges)), wanted)
        self.assertGreater(parted, 50)

    def test_projections(self):
        rows = [[("r", 2), ("r", 0), ("w", n)] for n in (3, 4, 5)]
        last = [("r", 3), ("r", 4), ("r", 5), ("w", 6)]
        graph = Graph([[("r", 0), ("w", 2)], *rows, last])
        wanted = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
        self.assertEqual(graph.relaxed(), wanted)  # (0, 4) is implied

    def test_dependent_nodes_stay_a_chain(self):
        self.assertIsNone(
            Graph([[("w", 2)], [("r", 2), ("w", 3)], [("r", 3), ("w", 2)]]).relaxed()
        )

    def test_inputs_may_be_one_tensor(self):
        self.assertIsNone(Graph([[("r", 0), ("w", 3)], [("w", 1)]]).relaxed())
        self.assertEqual(
            Graph([[("r", 0), ("w", 3)], [("r", 1), ("w", 4)]]).relaxed(), []
        )

    def test_nodes_that_fill_the_device(self):
        rows = [[("w", 2)], [("w", 3)]]
        self.assertEqual(Graph(rows, blocks=ROOM).relaxed(), [])
        self.assertIsNone(Graph(rows, blocks=ROOM + 1).relaxed())

    def test_distance(self):
        graph = Graph([[("r", 2)]] * 30)
        edges = graph.relaxed()
        for n in range(30):
            self.assertTrue(earlier(n, edges) >= set(range(n - NEAR)))

    def test_graph_that_is_no_chain(self):
        rows = [[("w", 2)], [("w", 3)], [("w", 4)]]
        self.assertIsNone(Graph(rows, edges=[(0, 1), (0, 2)]).relaxed())
        self.assertEqual(chain_of(3, [(2, 0), (0, 1)]), [2, 0, 1])
        self.assertIsNone(chain_of(3, [(0, 1)]))

    def test_address_that_is_not_of_the_capture(self):
        """It is a library's or the module's: of unknown extent."""
        graph = Graph([[("r", 2), ("w", 3)], [("r", 2), ("w", 4)]])
        template = graph.template
        slots = tuple(slot for slot in template.slots if slot.parameter == 0)
        graph.template = Template(REGIONS, template.nodes, slots)
        self.assertIsNone(graph.relaxed())


class TestProducts(TestCase):
    """Kernels of libraries are not declared, but what the operator was called with is."""

    ROWS = [[("r", 2), ("w", 3)], [("r", 2), ("w", 4)]]

    def product(self, n, reads, writes):
        ranges = ([(address(r), BYTES) for r in part] for part in (reads, writes))
        return Product(n, n + 1, *map(tuple, ranges))

    def test_two_products_of_one_tensor(self):
        graph = Graph(self.ROWS, known=())
        products = [self.product(0, [2], [3]), self.product(1, [2], [4])]
        self.assertEqual(graph.relaxed(products=products), [])
        self.assertIsNone(graph.relaxed(products=products[:1]))

    def test_product_that_reads_the_other(self):
        graph = Graph(self.ROWS, known=())
        products = [self.product(0, [], [2, 3]), self.product(1, [2], [4])]
        self.assertIsNone(graph.relaxed(products=products))

    def test_workspace_is_written(self):
        graph = Graph([[*row, ("w", 5)] for row in self.ROWS], known=())
        products = [self.product(0, [2], [3]), self.product(1, [2], [4])]
        self.assertIsNone(graph.relaxed(products=products))

    def test_word_that_is_device_memory(self):
        graph = Graph(
            [[*row, ("w", 5 + n)] for n, row in enumerate(self.ROWS)], known=()
        )
        slots = tuple(slot for slot in graph.template.slots if slot.parameter < 2)
        graph.template = Template(REGIONS, graph.template.nodes, slots)
        products = [self.product(0, [2], [3]), self.product(1, [2], [4])]
        self.assertEqual(graph.relaxed(products=products), [])
        device = {address(5), address(6)}
        self.assertIsNone(graph.relaxed(products=products, device=device))

    def test_tensors_of_one_region(self):
        """Two results of operators lie in one region of scratch memory."""
        graph = Graph([[("w", 2)], [("w", 2)]])
        nodes, (first, second) = graph.template.nodes, graph.template.slots
        slots = first, second._replace(delta=1024)
        graph.template = Template(REGIONS, nodes, slots)
        results = [(address(2), 1024), (address(2, 1024), 1024)]
        self.assertIsNone(graph.relaxed())
        self.assertEqual(graph.relaxed(results=results), [])
        self.assertIsNone(graph.relaxed(results=results, extent=1025))

    def test_operators(self):
        aten = torch.ops.aten
        self.assertTrue(is_product(aten.addmm.out))
        self.assertFalse(is_product(aten.add.Tensor))


if __name__ == "__main__":
    run_tests()
