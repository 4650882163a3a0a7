"""Which nodes of a captured graph run side by side. No GPU is needed: which edges a graph gets is pure, and the device
of `relaunch_device` runs the operators of a region in whatever order its edges allow, as late as they can be.
"""

import struct
import unittest
from types import SimpleNamespace

import torch
from hypothesis import given, HealthCheck, settings, strategies as st

import form  # noqa: F401
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay import config
from torch_overlay._inductor.relaunch.graph.concurrency import (
    CALLER,
    NodeUse,
    OUTSIDE,
    Product,
    relaxed,
    side_by_side,
    uses_of,
)
from torch_overlay._inductor.relaunch.proof.functions import parameters_of, signatures_of
from torch_overlay._inductor.relaunch.proof.nodes import (
    CopyNode,
    CopySide,
    FIXED,
    KernelNode,
    PointerSlot,
    Segment,
    Template,
)
from torch_overlay.testing import compile_only, simulated_gpu


ROOM = 100  # blocks
DEVICE = 0x7F0000000000  # device memory that is no region
AT = {region: 0x2C0000000000 + (region << 24) for region in range(8)}  # 0 and 1 are inputs
SEGMENTS = [Segment(address, 1 << 20, region) for region, address in AT.items()]


def use(reads=(), writes=(), blocks=1):
    return NodeUse(frozenset(reads), frozenset(writes), blocks / ROOM)


def chain(count):
    return [(i, i + 1) for i in range(count - 1)]


def reach(count, edges):
    """What comes after each node."""
    behind = [0] * count
    for u, v in sorted(edges, reverse=True):
        behind[u] |= 1 << v | behind[v]
    return behind


def pointer(address):
    return struct.pack("<Q", address)


def kernel(index, *parameters, func=7, blocks=1):
    """A node, and its pointer slots. A parameter is bytes, the (region, byte) of a pointer, or a list of such."""
    values, slots, at = [], [], 0
    for p, parts in enumerate(parameters):
        value = b""
        for part in parts if isinstance(parts, list) else [parts]:
            if isinstance(part, tuple):
                slots.append(PointerSlot(index, p, len(value), *part))
                part = pointer(AT.get(part[0], DEVICE) + part[1])
            value += part
        values.append((at, value))
        at += len(value)
    node = KernelNode(index, 100 + index, f"k{index}", func, 0, 0, (blocks, 1, 1), (32, 1, 1), 0, tuple(values))
    return node, slots


def template(*kernels):
    nodes, slots = zip(*kernels)
    return Template(8, nodes, tuple(slot for each in slots for slot in each))


class TestEdges(unittest.TestCase):
    def edges(self, *uses):
        found = side_by_side(range(len(uses)), uses)
        return found and sorted(found)

    def test_projections_of_one_tensor(self):
        q, k, v = (use({0, 10 + i}, {20 + i}, 16) for i in range(3))
        norm, attention = use({5}, {0}), use({20, 21, 22}, {30})
        self.assertEqual(self.edges(norm, q, k, v, attention), [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)])

    def test_each_waits_for_what_it_needs(self):
        q, k = use({0}, {1}), use({0}, {2})
        turned_q, turned_k = use((), {1}), use((), {2})
        self.assertEqual(self.edges(q, k, turned_q, turned_k, use({1, 2}, {3})), [(0, 2), (1, 3), (2, 4), (3, 4)])

    def test_fill_beside_a_kernel(self):
        gate, activation, fill, down = use({0}, {1}), use({1}, {2}, 190), use((), {9}), use({2}, {3, 9})
        self.assertEqual(self.edges(gate, activation, fill, down), [(0, 1), (1, 3), (2, 3)])

    def test_chain_stays_a_chain(self):
        self.assertIsNone(self.edges(use((), {0}), use({0}, {1}), use({1}, {2})))
        self.assertIsNone(self.edges(None, None, use()))

    def test_unknown_nodes_keep_their_place(self):
        edges = self.edges(use((), {0}), None, use((), {1}), use((), {2}), None)
        self.assertEqual(edges, [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)])

    def test_kernels_that_fill_the_device_wait(self):
        self.assertIsNone(self.edges(use((), {0}, 120), use((), {1}, 90)))
        self.assertIsNone(self.edges(use((), {0}, 900), use((), {1})))
        self.assertEqual(self.edges(use((), {0}, 120), use((), {1}, 70), use((), {2}, 90)), [(0, 2)])

    def test_nothing_is_far_ahead(self):
        """A node that needs nothing comes after the ninth before it."""
        links = [use({i}, {i + 1}) for i in range(12)]
        behind = reach(13, self.edges(*links, use((), {20})))
        self.assertEqual([behind[i] >> 12 & 1 for i in range(12)], [1] * 4 + [0] * 8)

    def test_what_is_needed_may_be_far(self):
        links = [use({i}, {i + 1}) for i in range(30)]
        edges = self.edges(use((), {40}), *links, use({40}, {41}))
        self.assertTrue(reach(32, edges)[0] >> 31 & 1, edges)

    def test_most_that_run_at_once(self):
        behind = reach(40, self.edges(*(use((), {i}) for i in range(40))))
        self.assertEqual(behind, [sum(1 << v for v in range(u + 9, 40)) for u in range(40)])

    def test_no_edge_is_implied(self):
        one = use((), {0})
        for uses in ([one, use(), one, use(), one], [None, use(), use(), None, one, use(), one]):
            edges = self.edges(*uses)
            for edge in edges:
                others = reach(len(uses), [e for e in edges if e != edge])
                self.assertFalse(others[edge[0]] >> edge[1] & 1, edges)

    @settings(deadline=None, max_examples=400)
    @given(st.data())
    def test_whatever_depends_stays_in_order(self, data):
        regions = st.frozensets(st.integers(0, 6), max_size=3)
        one = st.none() | st.builds(use, regions, regions, st.sampled_from([1, 40, 100, 300]))
        uses = data.draw(st.lists(one, min_size=1, max_size=30))
        order = data.draw(st.permutations(range(len(uses))))
        found = side_by_side(order, uses)
        if found is None:
            found = list(zip(order, order[1:]))
        at = {node: i for i, node in enumerate(order)}
        edges = [(at[u], at[v]) for u, v in found]
        self.assertTrue(all(u < v for u, v in edges))
        behind = reach(len(uses), edges)
        for u, v in edges:  # none is implied
            self.assertFalse(any(x != v and behind[x] >> v & 1 for w, x in edges if w == u), (u, v, edges))
        for u in range(len(uses)):
            for v in range(u + 1, len(uses)):
                a, b = uses[order[u]], uses[order[v]]
                free = (
                    a is not None and b is not None and not a.writes & (b.reads | b.writes) and not b.writes & a.reads
                )
                if not free or v - u > 8:
                    self.assertTrue(behind[u] >> v & 1, (u, v, edges))

    def test_chains_alone_are_relaxed(self):
        for nodes, edges in ((0, []), (3, [(0, 2), (1, 2)]), (4, [(0, 1), (1, 2), (2, 3), (0, 3)])):
            self.assertIsNone(relaxed(SimpleNamespace(nodes=range(nodes)), edges))


class TestUses(unittest.TestCase):
    def uses(self, made, letters=None, products=(), results=(), device=(), extents=None, room=ROOM):
        return uses_of(
            made,
            range(len(made.nodes)),
            SEGMENTS,
            2,
            letters or {},
            products,
            results,
            is_device_memory=lambda address: address in device,
            room=lambda node: room,
            extent=lambda node: (extents or {}).get(node.index),
        )

    def test_kernels_of_inductor(self):
        made = template(kernel(0, (0, 0), (3, 0), struct.pack("<I", 5), blocks=9), kernel(1, (0, 0), func=8))
        self.assertEqual(self.uses(made, {7: "rws"}), [use({CALLER}, {3}, 9), None])

    def test_letters_that_do_not_fit_tell_nothing(self):
        self.assertEqual(self.uses(template(kernel(0, (3, 0))), {7: "rw"}), [None])

    def test_what_is_read_and_written_is_written(self):
        self.assertEqual(self.uses(template(kernel(0, (3, 0), (3, 64))), {7: "rw"}), [use((), {3})])

    def test_inputs_may_share_memory(self):
        reads, writes = self.uses(template(kernel(0, (0, 0), (4, 0)), kernel(1, (5, 0), (1, 0))), {7: "rw"})
        self.assertTrue(reads.conflicts(writes))
        self.assertTrue(writes.conflicts(reads))

    def test_memory_that_is_no_region(self):
        made = template(kernel(0, pointer(DEVICE), pointer(DEVICE + 64), pointer(0)))
        self.assertEqual(self.uses(made, {7: "rww"}), [use((), {OUTSIDE})])
        self.assertEqual(self.uses(made, {7: "rrw"}), [use({OUTSIDE}, ())])

    def test_matrix_product(self):
        made = template(kernel(0, [(0, 0), (2, 0), (3, 0), struct.pack("<4I", 64, 1024, 0, 1)], func=1))
        product = Product(0, 1, ((AT[0], 1000), (AT[2], 1000)), ((AT[3], 1000),))
        self.assertEqual(self.uses(made, products=[product]), [use({CALLER, 2}, {3})])
        self.assertEqual(self.uses(made), [None])
        into_its_operand = Product(0, 1, ((AT[0], 1000), (AT[3], 1000)), ((AT[2], 1000),))
        self.assertEqual(self.uses(made, products=[into_its_operand]), [use({CALLER, 3}, {2})])

    def test_operand_that_is_the_result_too(self):
        made = template(kernel(0, [(2, 0), (0, 0)], func=1))
        product = Product(0, 1, ((AT[2], 8),), ((AT[0], 8),))
        self.assertEqual(self.uses(made, products=[product]), [use({2}, {CALLER})])
        self.assertEqual(self.uses(made, products=[Product(0, 1, ((AT[2], 8),), ())]), [use({2}, {CALLER})])

    def test_operand_and_result_in_one_region(self):
        """What operators returned lies in one region, where the program puts other results later."""
        made = template(kernel(0, [(2, 0), (2, 4096)], func=1))
        operand, result = (AT[2], 512), (AT[2] + 4096, 512)
        product = Product(0, 1, (operand,), (result,))
        self.assertEqual(self.uses(made, products=[product]), [use((), {2})])
        apart = [use({(2, operand[0])}, {(2, result[0])})]
        self.assertEqual(self.uses(made, products=[product], results=[operand, result]), apart)
        self.assertEqual(self.uses(made, products=[product], results=[(AT[2], 8192)]), [use((), {(2, AT[2])})])

    def test_what_was_returned_at_one_address_after_another(self):
        made = template(kernel(0, (2, 600)), kernel(1, (2, 1500)))
        results = [(AT[2] + 500, 1000), (AT[2], 600), (AT[2] + 1500, 8), (DEVICE, 8)]
        found = self.uses(made, {7: "w"}, results=results)
        self.assertEqual(found, [use((), {(2, AT[2])}), use((), {(2, AT[2] + 1500)})])

    def test_memory_that_the_program_does_not_know(self):
        """A library's, or Triton's: it may be where something was returned at another time, and be larger."""
        places = {2, (2, AT[2]), (2, AT[2] + 4096)}
        results = [(AT[2], 512), (AT[2] + 4096, 512)]
        made, elsewhere = template(kernel(0, (2, 4096))), template(kernel(0, (2, 8192)))
        self.assertEqual(self.uses(made, {7: "h"}, results=results), [use((), places)])
        self.assertEqual(self.uses(made, products=[Product(0, 1, (), ())], results=results), [use((), places)])
        self.assertEqual(self.uses(elsewhere, {7: "r"}, results=results), [use(places, ())])

    def test_bytes_of_a_fill(self):
        results = [(AT[2], 512), (AT[2] + 4096, 512)]
        for at, extent, places in ((4000, 64, {2}), (4000, 97, {2, (2, AT[2] + 4096)}), (0, 8, {2, (2, AT[2])})):
            made = template(kernel(0, (2, at)))
            self.assertEqual(self.uses(made, {7: "w"}, results=results, extents={0: extent}), [use((), places)])
        self.assertEqual(self.uses(template(kernel(0, (1, 0))), {7: "w"}, extents={0: 8}), [use((), {CALLER})])

    def test_numbers_of_the_generator(self):
        """Pointer slots that stay with the graph are nobody's region."""
        made = template(kernel(0, [(FIXED, 8), (2, 0)], func=1))
        self.assertEqual(self.uses(made, products=[Product(0, 1, ((AT[2], 8),), ())]), [use({2}, {CALLER})])

    def test_memory_of_the_library(self):
        """Two products that a library gives one buffer of its own aren't independent."""
        made = template(kernel(0, [(2, 0), pointer(DEVICE)], func=1))
        product = Product(0, 1, ((AT[2], 8),), ())
        self.assertEqual(self.uses(made, products=[product], device={DEVICE}), [use({2}, {OUTSIDE})])
        self.assertEqual(self.uses(made, products=[product]), [use({2}, ())])
        constant = Product(0, 1, ((AT[2], 8), (DEVICE - 8, 16)), ())
        self.assertEqual(self.uses(made, products=[constant], device={DEVICE}), [use({2, OUTSIDE}, ())])

    def test_address_between_two_windows(self):
        value = struct.pack("<I", 3) + pointer(DEVICE) + struct.pack("<I", 0)
        made = template(kernel(0, value, func=1))
        (found,) = self.uses(made, products=[Product(0, 1, (), ())], device={DEVICE})
        self.assertEqual(found, use((), {OUTSIDE}))

    def test_other_nodes_are_unknown(self):
        copy = CopyNode(0, 100, (CopySide(AT[3], 8, 1), CopySide(AT[2], 8, 1)), 8, 1, 1)
        self.assertEqual(self.uses(template((copy, ())), products=[Product(0, 1, (), ())]), [None])

    def test_a_chain_is_relaxed(self):
        made = template(kernel(0, (0, 0), (3, 0)), kernel(1, (0, 0), (4, 0)))
        known = {"inputs": 2, "letters": {7: "rw"}, "products": [], "results": [], "segments": SEGMENTS}
        known |= {"is_device_memory": bool, "room": lambda node: ROOM, "extent": lambda node: None}
        self.assertEqual(relaxed(made, chain(2), **known), [])
        self.assertIsNone(relaxed(made, [], **known))


class TestParameters(unittest.TestCase):
    def kernel(self, signature, kind="POINTWISE", mutated=(), constants=None, **binary):
        static = SimpleNamespace(function=0x10, functions={}, **{"arg_tys": "OOi", **binary})
        return SimpleNamespace(
            heuristic_type=SimpleNamespace(name=kind),
            triton_meta={"signature": signature, "constants": constants or {}},
            mutated_arg_names=list(mutated),
            launchers=[SimpleNamespace(bin=static)],
        )

    SIGNATURE = {"in_ptr0": "*bf16", "out_ptr0": "*bf16", "xnumel": "i32", "XBLOCK": "constexpr"}

    def test_names_tell(self):
        self.assertEqual(parameters_of({"k": self.kernel(self.SIGNATURE)}), {0x10: "rws"})
        self.assertEqual(parameters_of({"k": self.kernel(self.SIGNATURE, mutated=["in_ptr0"])}), {0x10: "wws"})
        other = {"in_out_ptr0": "*fp32", "ws_ptr": "*u8", "xnumel": "i32"}
        self.assertEqual(parameters_of({"k": self.kernel(other)}), {0x10: "wws"})

    def test_scratch_of_triton_is_written(self):
        kernel = self.kernel(self.SIGNATURE, has_global_scratch=True, has_profile_scratch=True)
        self.assertEqual(parameters_of({"k": kernel}), {0x10: "rwshh"})

    def test_constants_are_no_parameters(self):
        signature = {"in_ptr0": "*bf16", "load_seed_offset": "i32", "out_ptr0": "*bf16", "xnumel": "i32"}
        self.assertEqual(parameters_of({"k": self.kernel(signature, constants={"load_seed_offset": 1})}), {0x10: "rws"})
        self.assertEqual(parameters_of({"k": self.kernel(signature, constants={(1,): 1})}), {0x10: "rws"})

    def test_launchers_of_triton(self):
        """Torch's static launcher doesn't take all kernels: none with a name of more than 150 letters."""
        binary = SimpleNamespace(function=0x10, src=SimpleNamespace(signature=self.SIGNATURE, constants={}))
        exec("def launcher(): pass", scope := {"bin": binary, "runner": object()})
        kernel = self.kernel(self.SIGNATURE)
        kernel.launchers = [scope["launcher"]]
        self.assertEqual(parameters_of({"k": kernel}), {0x10: "rwshh"})
        self.assertEqual(signatures_of({"k": kernel}), {0x10: "ppspp"})

    def test_kernels_of_others_are_unknown(self):
        for kind in ("USER_AUTOTUNE", "TEMPLATE", "SPLIT_SCAN", "FIXED"):
            self.assertEqual(parameters_of({"k": self.kernel(self.SIGNATURE, kind), "torch": object()}), {})

    def test_declarations_that_differ_are_unknown(self):
        self.assertEqual(parameters_of({"k": self.kernel(self.SIGNATURE, arg_tys="OiO")}), {})


PROJECTIONS = region(
    "x, a, b, c",
    "q = new(8, 8)",
    "extern_kernels.mm(x, a, out=q)",
    "k = new(8, 8)",
    "extern_kernels.addmm(c, x, b, alpha=1, beta=2, out=k)",
    "other = extern_kernels.dot(q.view(-1), k.view(-1))",
    "out = new(8, 8)",
    "extern_kernels.mm(q, k, out=out)",
    "return (out, other)",
)


class Library:
    """In place of `extern_kernels`."""

    mm, addmm, dot = torch.mm, torch.addmm, torch.dot


@st.composite
def programs(draw):
    """The body of a region over three inputs, of which any may be written, and what it returns."""
    names, lines = ["a", "b", "c"], []
    for i in range(draw(st.integers(2, 10))):
        x, y = (draw(st.sampled_from(names)) for _ in range(2))
        what = draw(st.sampled_from(["new", "new", "new", "in place", "del"]))
        if what == "new":
            lines += [f"v{i} = empty_strided_cuda((8, 8), (8, 1), torch.float32)"]
            lines += [f"torch.{draw(st.sampled_from(['add', 'mul', 'maximum']))}({x}, {y}, out=v{i})"]
            names.append(f"v{i}")
        elif what == "in place":
            lines.append(f"{x}.{draw(st.sampled_from(['add_', 'copy_']))}({y})")
        elif x.startswith("v"):
            lines.append(f"del {x}")
            names.remove(x)
    kept = [name for name in names if name.startswith("v")]
    return "\n    ".join(["", *lines, f"return ({' '.join(f'{name},' for name in kept)})"])


class TestRegions(RelaunchTestCase):
    def overlapping(self, starts):
        base = torch.randn(24, 8)
        return [base[start : start + 8] for start in starts], base

    def test_products_of_a_capture(self):
        seen = []
        relax = self.device.relax
        self.device.relax = lambda first, *rest: (seen.append(first), relax(first, *rest))[1]
        run = self.runner(PROJECTIONS, extern_kernels=Library())
        inputs = [torch.randn(8, 8) for _ in range(4)]
        for _ in range(2):
            run(list(inputs))
        (captured,) = seen
        self.assertEqual([(p.first, p.end) for p in captured.observer.products], [(0, 1), (1, 2), (3, 4)])
        at = {s.address: s.region for s in captured.segments}
        regions = [
            [[at[address] for address, _ in ranges] for ranges in (p.reads, p.writes)]
            for p in captured.observer.products
        ]
        q, k = regions[0][1], regions[1][1]
        self.assertEqual(regions[:2], [[[0, 1], q], [[3, 0, 2], k]])
        self.assertEqual(regions[2][0], q + k)
        self.assertEqual(
            [size for _, size in captured.observer.products[0].reads + captured.observer.products[0].writes], [256] * 3
        )

    def test_independent_neighbours(self):
        source = PROJECTIONS.replace("extern_kernels", "torch")
        run = self.runner(source)
        for _ in range(4):
            inputs = [torch.randn(8, 8) for _ in range(4)]
            x, a, b, c = inputs
            q, k = x @ a, torch.addmm(c, x, b, beta=2)
            self.assertEqual(run(list(inputs)), (q @ k, torch.dot(q.view(-1), k.view(-1))))
        self.assertEqual(self.device.relaxed, 1)

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.differing_executors])
    @given(programs(), st.lists(st.tuples(*[st.sampled_from([0, 8, 16])] * 3), min_size=4, max_size=4))
    def test_whatever_the_order_of_the_device(self, body, calls):
        """Inputs of later calls share memory as those of the capture did not."""
        source = region("a, b, c", body.strip())
        run = self.runner(source, mutated=(0, 1, 2))
        scope = {"torch": torch, "empty_strided_cuda": torch.empty_strided}
        scope["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
        exec(source, scope)
        for starts in [(0, 8, 16), (0, 8, 16), *calls]:
            given, base = self.overlapping(starts)
            clone = base.clone()
            expected = scope["region"]([clone[start : start + 8] for start in starts])
            self.assertEqual(run(given), expected)
            self.assertEqual(base, clone)
        run.forget()


def products(x):
    return x @ x @ x @ x


@unittest.skipIf(torch.cuda.is_available(), "the GPU is simulated here")
class TestBuffers(RelaunchTestCase):
    """Where a buffer takes the place of one that was read, its kernel waits for the reader."""

    def reuses(self, fn=products, backward=False):
        with simulated_gpu():
            x = torch.randn(32, 32, device="cuda", requires_grad=backward)
            made = compile_only(fn, x, mode="reduce-overhead", backward=backward)
        return sum(wrapper.count("# reuse") for wrapper in made.wrappers)

    def test_buffers_of_inference_are_apart(self):
        self.assertEqual(self.reuses(), 0)

    def test_others_are_not(self):
        with config.patch(cudagraphs="trees"):
            self.assertGreater(self.reuses(), 0)
        with config.patch(cudagraph_concurrency=False):
            self.assertGreater(self.reuses(), 0)
        self.assertGreater(self.reuses(lambda x: products(x).sum(), backward=True), 0)

    def test_buffers_of_streams_are_as_planned(self):
        def fn(x):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = products(x.t())
            z = products(x)
            torch.cuda.current_stream().wait_stream(side)
            return y + z

        self.assertGreater(self.reuses(fn), 0)
