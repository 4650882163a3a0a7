"""Captured graphs, as the driver describes them: read into plain data, and tidied.

Without a GPU the driver is a fake that keeps graphs in dictionaries, with the real structs of cuda.bindings. The
kernels for memset and memcpy nodes are compiled for a device, and run by Triton's interpreter.
"""

import re
import unittest
import unittest.mock
from types import SimpleNamespace

import torch
import triton
from hypothesis import given, HealthCheck, settings, strategies as st
from triton.backends.compiler import GPUTarget

import form
from stand_ins.captured_words import LOW, memory, slots, SPAN, u32, u64
from stand_ins.graph_api import FakeApi
from torch_overlay import orders
from torch_overlay._inductor.relaunch import graph
from torch_overlay._inductor.relaunch.capture.recording import AddressSpace
from torch_overlay._inductor.relaunch.graph import driver as cu, fill_copy_kernels, read
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.proof.functions import signatures_of
from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    CopySide,
    FillNode,
    KernelNode,
    Segment,
    Unprovable,
)
from torch_overlay._inductor.relaunch.proof.prove import prove
from torch_overlay.csrc import DriverError


class FakeKernels:
    """Kernels by name; what they are asked for is what they get as arguments."""

    FILL, COPY = 0xF1, 0xC0

    def declare(self, api):
        api.declare(self.FILL, "fill", 8, 4, 8)
        api.declare(self.COPY, "copy", 8, 8, 8)

    def fill(self, target, value, element_size, count):
        arguments = u64(target), u32(value), u64(element_size * count)
        return cu.KernelLaunch(self.FILL, (count, 1, 1), (128, 1, 1), 0, arguments)

    def copy(self, target, source, size):
        return cu.KernelLaunch(self.COPY, (size, 1, 1), (128, 1, 1), 0, (u64(target), u64(source), u64(size)))


class GraphTest(unittest.TestCase):
    def setUp(self):
        self.api = FakeApi()
        self.driver = cu.Driver(self.api, self.api)
        self.kernels = FakeKernels()
        self.kernels.declare(self.api)
        self.enterContext(unittest.mock.patch.object(graph, "fill_copy_kernels", self.kernels, create=True))

    def read(self, segments=()):
        return read.read(0x77, segments, 0, 1 << 20, driver=self.driver)

    def tidy(self):
        return read.tidy(0x77, driver=self.driver)

    def refused(self, reason, pattern):
        with self.assertRaisesRegex(Unprovable, pattern) as context:
            self.read()
        self.assertEqual(context.exception.reason, reason)

    def names(self):
        """What the nodes are, in the graph's order."""
        return [n.name for n in self.read().nodes]


class TestRead(GraphTest):
    def test_kernel_with_separate_parameters(self):
        self.api.declare(7, "_Z3addPfS_i", 8, 4, 8)
        handle = self.api.kernel(7, u64(0xAAAA), u32(5), u64(0xBBBB))
        (node,) = self.read().nodes
        expected = KernelNode(
            index=0, handle=handle, name="_Z3addPfS_i", func=7, kern=0, ctx=0, grid=(2, 3, 4), block=(32, 2, 1),
            shared_bytes=48, parameters=((0, u64(0xAAAA)), (8, u32(5)), (16, u64(0xBBBB))),
        )  # fmt: skip
        self.assertEqual(node, expected)

    def test_graph_that_a_stream_is_captured_into(self):
        self.assertEqual(self.driver.captured_into(0x99), 0x77)
        self.assertEqual(self.driver.captured_into(0), 0)

    def test_memset(self):
        handle = self.api.memset(0xAB00, value=3, element_size=2, width=10, height=2, pitch=64)
        expected = FillNode(index=0, handle=handle, dst=0xAB00, value=3, element_size=2, width=10, height=2, pitch=64)
        self.assertEqual(self.read().nodes, (expected,))

    def test_memcpy_and_its_offsets(self):
        self.api.memcpy(0x1000, 0x2000, 16, height=2, depth=3, srcXInBytes=4, srcY=1, srcZ=2, srcPitch=64, srcHeight=8)
        (node,) = self.read().nodes
        self.assertEqual(node.sides, (CopySide(0x1000), CopySide(0x2000 + 4 + 64 * (1 + 8 * 2), 64, 8)))
        self.assertEqual((node.width, node.height, node.depth), (16, 2, 3))

    def test_memcpy_of_other_memory(self):
        for kinds, text in (((2, 1), "from host memory"), ((1, 2), "to host memory"), ((2, 3), "from an array")):
            with self.subTest(text):
                self.api.kind.clear()
                self.api.memcpy(0x1000, 0x2000, 16, kinds=kinds)
                self.refused("host-memory", f"it copies {text}")

    def test_memcpy_of_unified_addresses(self):
        self.api.memcpy(0x1000, 0x2000, 16, kinds=(4, 4))
        self.api.device_memory |= {0x1000, 0x2000}
        self.assertEqual(self.read().nodes[0].sides[1].address, 0x2000)
        self.api.device_memory.discard(0x2000)
        self.refused("host-memory", "it copies from host memory")
        self.api.host_memory.add(0x2000)
        self.refused("host-memory", "it copies from host memory")

    def test_nodes_that_cannot_be_patched(self):
        unknown = "nodes of this kind can't be patched"
        for kind, text in (
            (cu.HOST, r"node 1 \(host callback\): a host function was called"),
            (cu.CHILD_GRAPH, r"node 1 \(child graph\)"),
            (cu.WAIT_EVENT, "waits for an event"),
            (cu.RECORD_EVENT, "records an event"),
            (10, "allocated memory"),
            (13, "control flow"),
            (12, rf"node 1 \(batch of memory operations\): {unknown}"),
            (99, rf"node 1 \(unknown kind\): {unknown}"),
        ):
            with self.subTest(text):
                self.api.kind.clear()
                self.api.new(cu.EMPTY)
                self.api.new(kind)
                self.refused("node-kind", text)

    def test_edges_and_segments(self):
        first = self.api.new(cu.EMPTY)
        second = self.api.new(cu.EMPTY, after=[first])
        self.api.new(cu.EMPTY, after=[second, first])
        segments = [Segment(0, 512, 0)]
        graph = self.read(segments)
        self.assertEqual(graph.edges, ((0, 1), (0, 2), (1, 2)))
        self.assertEqual((graph.segments, graph.low, graph.high), (tuple(segments), 0, 1 << 20))

    def test_graph_object(self):
        self.api.new(cu.EMPTY)
        graph = unittest.mock.Mock(raw_cuda_graph=lambda: 0x77)
        self.assertEqual(len(read.read(graph, (), 0, 1, driver=self.driver).nodes), 1)

    def test_empty_graph(self):
        self.assertEqual(self.read(), CapturedGraph((), (), (), 0, 1 << 20))

    def test_device_memory(self):
        self.api.device_memory.add(64)
        self.assertTrue(self.driver.is_device_memory(64))
        self.assertFalse(self.driver.is_device_memory(128))

    def test_freed_memory(self):
        block = lambda address, size, state: {"address": address, "size": size, "state": state}  # noqa: E731
        second = [block(0x900, 0x100, "inactive")]
        first = [
            block(0x100, 0x100, "active_allocated"), block(0x200, 0x80, "inactive"), block(0x280, 8, "active_pending")
        ]  # fmt: skip
        freed = read.freed_memory(lambda: [{"blocks": second}, {"blocks": first}])
        ends = (0, 0xFF, 0x100, 0x1FF, 0x200, 0x27F, 0x280, 0x300, 0x8FF, 0x900, 0x9FF, 0xA00)
        self.assertEqual([a for a in ends if freed(a)], [0x200, 0x27F, 0x900, 0x9FF])

    def test_driver_error_names_the_function(self):
        with self.assertRaisesRegex(DriverError, r"error in cuGraphAddKernelNode: CUDA_ERROR_INVALID_VALUE \(1\)"):
            self.api.forbidden.add(0)
            self.driver.add_kernel(0x77, [], cu.KernelLaunch(0, (1, 1, 1), (1, 1, 1), 0, ()))

    def test_every_driver_function_exists(self):
        from cuda.bindings import driver

        for name in dir(FakeApi):
            if name.startswith("cu"):
                self.assertTrue(callable(getattr(driver, name)), name)


DAGS = st.integers(0, 8).flatmap(
    lambda n: st.tuples(
        st.just(n), st.sets(st.tuples(st.integers(0, n), st.integers(0, n))), st.permutations(range(n + 1))
    )
)


class TestTidy(GraphTest):
    def setUp(self):
        super().setUp()
        self.api.declare(7, "work", 8)

    def test_memset_and_memcpy_become_kernels(self):
        first = self.api.kernel(7, u64(1))
        fill = self.api.memset(0x1000, value=9, element_size=4, width=4, after=[first])
        copy = self.api.memcpy(0x2000, 0x1000, 16, after=[fill])
        last = self.api.kernel(7, u64(2), after=[copy])
        self.assertEqual(self.tidy(), [])
        graph = self.read()
        handles = [n.handle for n in graph.nodes]
        self.assertEqual(self.names(), ["work", "work", "fill", "copy"])
        self.assertEqual(handles[:2], [first, last])
        self.assertEqual(graph.edges, ((0, 2), (2, 3), (3, 1)))
        self.assertEqual([v for _, v in graph.nodes[2].parameters], [u64(0x1000), u32(9), u64(16)])
        self.assertEqual([v for _, v in graph.nodes[3].parameters], [u64(0x2000), u64(0x1000), u64(16)])

    def test_nodes_in_a_row_and_side_by_side(self):
        root = self.api.memset(0x1000)
        branches = [self.api.memset(0x1000 * i, after=[root]) for i in (2, 3)]
        self.api.kernel(7, u64(1), after=branches)
        self.assertEqual(self.tidy(), [])
        self.assertEqual(self.read().edges, ((1, 2), (1, 3), (2, 0), (3, 0)))

    def test_rows_that_are_adjacent(self):
        self.api.memset(0x1000, element_size=2, width=8, height=3, pitch=16)
        self.api.memcpy(0x2000, 0x1000, 32, height=4, dstPitch=32, srcPitch=32)
        self.assertEqual(self.tidy(), [])
        fill, copy = self.read().nodes
        self.assertEqual((fill.parameters[2][1], copy.parameters[2][1]), (u64(48), u64(128)))

    def test_rows_that_are_not_adjacent_stay(self):
        self.api.memset(0x1000, element_size=1, width=8, height=3, pitch=16)
        self.api.memcpy(0x2000, 0x1000, 32, height=4, dstPitch=64, srcPitch=32)
        self.api.memcpy(0x2000, 0x1000, 32, height=2, depth=2, dstPitch=32, srcPitch=32, dstHeight=2, srcHeight=4)
        kept = self.tidy()
        self.assertEqual(kept[0], "memset node 0: its rows are not adjacent")
        self.assertEqual(len(kept), 3)
        self.assertEqual(self.names(), ["memset", "memcpy", "memcpy"])

    def test_copies_of_host_memory_and_empty_fills_stay(self):
        self.api.memcpy(0x2000, 0x1000, 32, kinds=(2, 1))
        self.api.memset(0x1000, width=0)
        copied = "memcpy node 0: node 0 (memcpy): it copies from host memory"
        self.assertEqual(self.tidy(), [copied, "memset node 1: 0 blocks"])

    def test_kernel_with_other_parameters_is_not_used(self):
        self.api.declare(FakeKernels.FILL, "fill", 8, 4, 8, 8)
        self.api.memset(0x1000)
        (reason,) = self.tidy()
        self.assertIn("takes parameters of [8, 4, 8, 8] bytes, not [8, 4, 8]", reason)

    def test_driver_error_leaves_the_node(self):
        before = self.api.kernel(7, u64(1))
        self.api.memset(0x1000, after=[before])
        self.api.forbidden.add(FakeKernels.FILL)
        self.assertIn("cuGraphAddKernelNode: CUDA_ERROR_INVALID_VALUE", self.tidy()[0])
        self.assertEqual((self.names(), self.read().edges), (["work", "memset"], ((0, 1),)))

    def test_driver_error_on_the_way_leaves_one_node(self):
        last = self.api.kernel(7, u64(1))
        fill = self.api.memset(0x1000)
        self.api.edge_list.append((fill, last, "plain"))
        self.api.cuGraphAddDependencies = lambda *args: self.api.invalid()
        self.assertIn("cuGraphAddDependencies", self.tidy()[0])
        self.assertEqual((self.names(), self.read().edges), (["work", "memset"], ((1, 0),)))

    def test_compiler_error_leaves_the_node(self):
        self.api.memset(0x1000)
        with unittest.mock.patch.object(self.kernels, "fill", side_effect=RuntimeError("no compiler")):
            self.assertEqual(self.tidy(), ["memset node 0: no compiler"])

    def test_programmatic_edges_are_left_alone(self):
        a, b = self.api.kernel(7, u64(1)), self.api.kernel(7, u64(2))
        fill = self.api.memset(0x1000, after=[a])
        c = self.api.kernel(7, u64(3), after=[b, a])
        self.api.edge_list += [(a, b, "programmatic"), (b, fill, "launch order")]
        before = sorted(self.api.edge_list)
        kept = self.tidy()
        # a -> b -> c does not imply a -> c: b may start, and end, before a has ended.
        self.assertEqual(kept, ["memset node 2: it has programmatic dependencies"])
        self.assertEqual(sorted(self.api.edge_list), before)
        self.assertEqual(self.api.edges_between(a, b, fill, c), [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)])

    def test_implied_edges_are_removed(self):
        a = self.api.kernel(7, u64(1))
        b = self.api.kernel(7, u64(2), after=[a])
        c = self.api.kernel(7, u64(3), after=[a, b])
        d = self.api.kernel(7, u64(4), after=[a, b, c])
        self.assertEqual(self.tidy(), [])
        self.assertEqual(self.api.edges_between(a, b, c, d), [(0, 1), (1, 2), (2, 3)])

    def test_graphs_that_will_be_refused_are_not_touched(self):
        self.api.new(10)
        self.api.memset(0x1000)
        self.assertEqual(self.tidy(), ["graph with memory allocation nodes"])
        self.assertEqual(self.api.kind[max(self.api.kind)], cu.MEMSET)

    def test_edges_are_set(self):
        a = self.api.kernel(7, u64(1))
        b = self.api.kernel(7, u64(2), after=[a])
        c = self.api.kernel(7, u64(3), after=[b])
        self.assertTrue(read.set_edges(0x77, [a, b, c], [(0, 2), (0, 1)], driver=self.driver))
        self.assertEqual([e[:2] for e in self.api.edge_list], [(a, c), (a, b)])

    def test_programmatic_edges_stay_or_go(self):
        a, b, c = (self.api.kernel(7, u64(i)) for i in range(3))
        self.api.edge_list += [(a, b, "programmatic"), (b, c, "programmatic")]
        self.assertTrue(read.set_edges(0x77, [a, b, c], [(0, 2), (0, 1)], driver=self.driver))
        self.assertEqual(self.api.edge_list, [(a, b, "programmatic"), (a, c, "plain")])

    def test_edges_that_order_nothing_are_left_alone(self):
        a, b, c = (self.api.kernel(7, u64(i)) for i in range(3))
        before = self.api.edge_list[:] + [(a, b, "launch order"), (b, c, "plain")]
        self.api.edge_list[:] = before
        self.assertFalse(read.set_edges(0x77, [a, b, c], [(0, 2), (0, 1)], driver=self.driver))
        self.assertEqual(self.api.edge_list, before)

    def test_tidied_captures_are_proven(self):
        captured = []
        for which in "ab":
            self.api = FakeApi()
            self.driver = cu.Driver(self.api, self.api)
            self.kernels.declare(self.api)
            segments = memory(which)
            fill = self.api.memset(segments[0].address + 16)
            self.api.memcpy(segments[1].address, segments[0].address, 64, after=[fill])
            self.tidy()
            captured.append(read.read(0x77, segments, LOW[which], LOW[which] + SPAN, driver=self.driver))
        self.assertEqual(slots(prove(*captured)), [(0, 0, 0, 0, 16), (1, 0, 0, 1, 0), (1, 1, 0, 0, 0)])

    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.differing_executors])
    @given(DAGS)
    def test_transitive_reduction(self, drawn):
        size, pairs, names = drawn
        edges = {(names[u], names[v]) for u, v in pairs if u < v}
        implied = orders.implied_edges({u: [v for x, v in edges if x == u] for u in range(size + 1)})

        def reach(edges):
            known = set(edges)
            while more := {(u, w) for u, v in known for x, w in known if v == x} - known:
                known |= more
            return known

        kept = edges - set(implied)
        self.assertEqual(reach(kept), reach(edges))
        self.assertTrue(all(reach(kept - {edge}) != reach(edges) for edge in kept))


class TestPlainKernels(unittest.TestCase):
    """The kernels for memset and memcpy nodes: compiled for a device, and run by Triton's interpreter."""

    CASES = [
        ("fill", 0x1000, 0, 4, 4),
        ("fill", 0x1000, 0x1AB, 1, 4096),
        ("fill", 0x1002, 0xABCD, 2, 33),
        ("fill", 0x1004, 0x12345678, 4, 1 << 20),
        ("copy", 0x1000, 0x2000, 1 << 20),
        ("copy", 0x1001, 0x2000, 77),
        ("copy", 0x1004, 0x2000, 12),
    ]

    def launches(self):
        """Each case with what `_function` was asked for, and its launch."""
        for kind, *arguments in self.CASES:
            with (
                unittest.mock.patch.object(fill_copy_kernels, "_device", lambda: 0),
                unittest.mock.patch.object(fill_copy_kernels, "_function", return_value=1) as function,
            ):
                launch = getattr(fill_copy_kernels, kind)(*arguments)
            yield (kind, *arguments), function.call_args.args[:3], launch

    def test_arguments_fit_the_compiled_kernels(self):
        bits = {"u64": 8, "u32": 4}
        for case, wanted, launch in self.launches():
            with self.subTest(case):
                target = GPUTarget("cuda", 90, 32)
                compiled = triton.compile(
                    fill_copy_kernels.source(*wanted), target=target, options=fill_copy_kernels.OPTIONS
                )
                entry = compiled.asm["ptx"].split(".entry")[1].split("{")[0]
                sizes = [bits[kind] for kind in re.findall(r"\.param \.(\w+)", entry)]
                self.assertEqual(sizes, [len(value) for value in launch.arguments])
                self.assertEqual(compiled.metadata.shared + compiled.metadata.global_scratch_size, 0)
                self.assertEqual(launch.block, (32 * compiled.metadata.num_warps, 1, 1))

    def test_units_and_hints(self):
        chosen = [(wanted, launch.grid[0]) for _, wanted, launch in self.launches()]
        expected = [
            (("fill", 4, False), 1),  # too few elements for a vector
            (("fill", 4, True), 1),
            (("fill", 2, False), 1),
            (("fill", 4, False), 1024),  # the address is aligned to 4 bytes only
            (("copy", 4, True), 256),
            (("copy", 1, False), 1),
            (("copy", 4, False), 1),
        ]
        self.assertEqual(chosen, expected)

    def test_bytes_are_repeated_to_words(self):
        values = [launch.arguments[1] for (kind, *_), _, launch in self.launches() if kind == "fill"]
        self.assertEqual(values, [u32(0), u32(0xABABABAB), u32(0xABCD), u32(0x12345678)])

    def test_kernels_interpreted(self):
        code = """
import form, torch
from torch_overlay._inductor.relaunch.graph.fill_copy_kernels import BLOCK, copy_kernel, fill_kernel

for dtype, value, expected in ((torch.int8, 0x17F, 0x7F), (torch.int16, 0x1234, 0x1234), (torch.int32, -2, -2)):
    for count in (1, 5, BLOCK, 2 * BLOCK + 3):
        grid = (-(-count // BLOCK),)
        target = torch.zeros(count + 8, dtype=dtype)
        fill_kernel[grid](target, value, count, BLOCK=BLOCK)
        assert bool((target[:count] == expected).all()) and not target[count:].any(), (dtype, count)
        source = torch.arange(count + 8).to(dtype)
        target = torch.zeros(count + 8, dtype=dtype)
        copy_kernel[grid](target, source, count, BLOCK=BLOCK)
        assert torch.equal(target[:count], source[:count]) and not target[count:].any(), (dtype, count)
print("interpreted")
"""
        result = form.fork_python(code, env={"TRITON_INTERPRET": "1"})
        self.assertEqual(result.stdout, "interpreted\n", result.stderr)


class TestSignatures(unittest.TestCase):
    """The declared parameters of the Triton kernels in a generated module."""

    def module(self, *binaries):
        return {"kernel": SimpleNamespace(launchers=[SimpleNamespace(bin=b) for b in binaries]), "torch": object()}

    def test_kernels_of_the_static_launcher(self):
        scratch = {"has_global_scratch": True, "has_profile_scratch": True}
        kernel = SimpleNamespace(arg_tys="OOif", function=None, functions={0: 0x10, 1: 0x20}, **scratch)
        tma = SimpleNamespace(arg_tys="OMil", function=0x30, functions={}, has_global_scratch=True)
        found = signatures_of(self.module(kernel, tma))
        self.assertEqual(found, {0x10: "ppsspp", 0x20: "ppsspp", 0x30: "p?ssp"})

    def test_launchers_of_the_static_kind(self):
        class Kernel(SimpleNamespace):
            def run(self):
                pass

        kernel = Kernel(arg_tys="Oi", function=0x10, functions={}, has_global_scratch=True, has_profile_scratch=True)
        scope = {"runner": kernel.run}
        exec("def launcher(): runner()", scope)
        found = signatures_of({"kernel": SimpleNamespace(launchers=[scope["launcher"]])})
        self.assertEqual(found, {0x10: "pspp"})

    def test_static_launchers_have_their_kernel_where_it_is_looked_for(self):
        """Upstream's own fast path takes it from there."""
        import inspect

        from torch._inductor.runtime import static_triton_launcher, triton_heuristics

        text = inspect.getsource(triton_heuristics.CachingAutotuner._build_fast_launcher)
        self.assertIn('launcher.__globals__.get("runner")', text)
        self.assertIn("runner.__self__", text)
        text = inspect.getsource(triton_heuristics.StaticTritonCompileResult)
        self.assertIn('"runner": self.kernel.run', text)
        text = inspect.getsource(static_triton_launcher.StaticallyLaunchedTritonKernel)
        for name in ("self.arg_tys", "self.function", "self.functions", "has_global_scratch", "has_profile_scratch"):
            self.assertIn(name, text)

    def test_kernels_of_triton(self):
        source = fill_copy_kernels.source("fill", 4, True)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=fill_copy_kernels.OPTIONS)
        self.assertEqual(signatures_of(self.module(compiled)), {}, "not loaded yet")
        compiled.function = 0x40
        self.assertEqual(signatures_of(self.module(compiled)), {0x40: "psspp"})

    def test_kernels_with_descriptors_are_left_out(self):
        source = SimpleNamespace(signature={"x": "tensordesc<fp16[64, 64]>", "n": "i32"}, constants={})
        self.assertEqual(signatures_of(self.module(SimpleNamespace(src=source, function=1))), {})

    def test_constants_are_no_parameters(self):
        source = SimpleNamespace(signature={"x": "*fp32", "one": "i32", "n": "i32"}, constants={(1,): 1})
        self.assertEqual(signatures_of(self.module(SimpleNamespace(src=source, function=1))), {1: "pspp"})


@form.needs_gpu
class TestOnGpu(unittest.TestCase):
    """What only the driver can tell. Ordinary memory serves as the captures' ranges."""

    def capture(self, fn):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            fn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            fn()
        return graph

    def test_fills_and_copies_run_as_kernels(self):
        a, b = torch.empty(5000, device="cuda"), torch.empty(5000, device="cuda")
        small, odd = torch.empty(4, dtype=torch.int32, device="cuda"), torch.empty(77, dtype=torch.uint8, device="cuda")

        driver = Driver()
        api = driver.api

        def memset(tensor, function, count):
            stream = api.CUstream(torch.cuda.current_stream().cuda_stream)
            driver.call(function, api.CUdeviceptr(tensor.data_ptr()), 0, count, stream)

        def fn():
            memset(a, "cuMemsetD32Async", a.numel())
            b.copy_(a)
            b.add_(1)
            a.copy_(b)
            memset(small, "cuMemsetD32Async", small.numel())
            memset(odd, "cuMemsetD8Async", odd.numel())

        graph = self.capture(fn)
        self.assertEqual(read.tidy(graph, driver=driver), [])
        captured = read.read(graph, (), 0, 1, driver=driver)
        self.assertEqual({type(n) for n in captured.nodes}, {KernelNode}, [n.name for n in captured.nodes])
        graph.instantiate()
        for t in (a, b, small, odd):
            t.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(bool((a == 1).all()) and bool((b == 1).all()) and not small.any() and not odd.any())

    def test_every_fill_and_copy_variant(self):
        source = torch.randint(0, 255, (1 << 16,), dtype=torch.uint8, device="cuda")
        target = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
        graph = self.capture(lambda: target.copy_(source))
        driver = Driver()
        handle = graph.raw_cuda_graph()
        (node,) = driver.structure(handle).nodes
        read._replaced(
            driver, handle, node, fill_copy_kernels.copy(target.data_ptr() + 1, source.data_ptr(), 1001), [], []
        )
        for launch in (
            fill_copy_kernels.copy(target.data_ptr() + 4096, source.data_ptr(), 4096),
            fill_copy_kernels.copy(target.data_ptr() + 8196, source.data_ptr() + 4, 100),
            fill_copy_kernels.fill(target.data_ptr() + 12289, 0x17F, 1, 99),
            fill_copy_kernels.fill(target.data_ptr() + 16386, 0x1234, 2, 3),
            fill_copy_kernels.fill(target.data_ptr() + 20480, 0x01020304, 4, 4096),
        ):
            driver.add_kernel(handle, [], launch)
        graph.instantiate()
        target.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.zeros(1 << 16, dtype=torch.uint8)
        host = source.cpu()
        expected[1:1002], expected[4096:8192], expected[8196:8296] = host[:1001], host[:4096], host[4:104]
        expected[12289:12388] = 0x7F
        expected[16386:16392] = torch.tensor([0x34, 0x12] * 3, dtype=torch.uint8)
        expected[20480 : 20480 + 4 * 4096] = torch.tensor([4, 3, 2, 1] * 4096, dtype=torch.uint8)
        self.assertTrue(torch.equal(target.cpu(), expected), (target.cpu() != expected).nonzero()[:10])

    def test_library_kernels_are_read_whole(self):
        x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)
        graph = self.capture(lambda: (torch.mm(x, x, out=out), out.float().sum(0), torch.softmax(x, 1)))
        for node in read.read(graph, (), 0, 1, driver=Driver()).nodes:
            if isinstance(node, KernelNode):
                self.assertTrue(node.name)
                self.assertTrue(node.parameters, node.name)
        blobs = b"".join(v for n in read.read(graph, (), 0, 1, driver=Driver()).nodes for _, v in n.parameters)
        for tensor in (x, out):
            self.assertIn(u64(tensor.data_ptr()), blobs)

    def test_signatures_fit_the_nodes(self):
        x = torch.randn(1000, 77, device="cuda")
        compiled = torch.compile(lambda x: (x.softmax(1), x.sin().cumsum(0)))
        graph = self.capture(lambda: compiled(x))
        from torch._inductor.codecache import PyCodeCache

        found = {}
        for module in PyCodeCache.modules:
            found |= signatures_of(vars(module))
        nodes = [n for n in read.read(graph, (), 0, 1, driver=Driver()).nodes if isinstance(n, KernelNode)]
        declared = [n for n in nodes if n.func in found]
        handles = f"the nodes have {[(n.name, hex(n.func), hex(n.kern)) for n in nodes]}, the modules {found}"
        self.assertTrue(declared, handles)
        for node in declared:
            self.assertEqual(len(found[node.func]), len(node.parameters), node.name)

    def test_two_captures_are_proven(self):
        """With a library that takes a workspace from the capture's pool."""

        def fn(x, y):
            torch.mm(x, x, out=y)
            y.add_(x)
            y.zero_()

        fn(*(torch.ones(256, 256, device="cuda") for _ in range(2)))
        torch.cuda.synchronize()
        captured, keep, driver = [], [], Driver()
        for gap in (1, 3):
            space = AddressSpace(torch.cuda.current_device(), gap=gap)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            size = 4 * 256 * 256
            torch._C._cuda_clearCublasWorkspaces()
            with space:
                at = [space.allocate(size) for _ in range(2)]
                storages = [torch._C._construct_storage_from_data_pointer(a, space.device, size) for a in at]
                tensors = [torch.empty(0, device="cuda").set_(s, 0, (256, 256), (256, 1)) for s in storages]
                with torch.cuda.graph(graph, pool=space.pool().id):
                    fn(*tensors)
            torch._C._cuda_clearCublasWorkspaces()
            read.tidy(graph, driver=driver)
            segments, scratch = [], 0
            for address, length in space.allocations():
                known = address in at
                segments.append(Segment(address, length, at.index(address) if known else 2, 0 if known else scratch))
                scratch += 0 if known else length
            captured.append(read.read(graph, segments, space.low, space.high, driver=driver))
            keep.append((tensors, graph, space))
        found = prove(*captured, foreign=read.freed_memory(torch.cuda.memory_snapshot))
        self.assertLessEqual({0, 1}, {s.region for s in found.slots})
