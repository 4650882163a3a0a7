# Owner(s): ["module: inductor"]

import random
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch.driver import DriverError, Edge, Structure
from torch._inductor.cudagraph_relaunch.edit import Editor, implied_edges, Launch
from torch._inductor.cudagraph_relaunch.nodes import Refusal
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


def reached(after, node):
    found, todo = set(), set(after[node])
    while todo:
        found |= todo
        todo = {m for n in todo for m in after[n]} - found
    return found


class TestImpliedEdges(TestCase):
    def test_drawn_graphs(self):
        rng, removed = random.Random(0), 0
        for _ in range(200):
            size = rng.randrange(1, 12)
            names = rng.sample(range(100), size)
            after = {name: [] for name in rng.sample(names, size)}
            for i, name in enumerate(names):
                after[name] = [m for m in names[i + 1 :] if rng.random() < 0.4]
            implied = implied_edges(after)
            kept = {n: [m for m in after[n] if (n, m) not in implied] for n in after}
            for node in after:
                self.assertEqual(reached(kept, node), reached(after, node))
                for other in kept[node]:  # each that is kept is needed
                    less = {**kept, node: [m for m in kept[node] if m != other]}
                    self.assertNotIn(other, reached(less, node))
            removed += len(implied)
        self.assertGreater(removed, 100)


class TestReplace(TestCase):
    """Node 2 of 1 -> 2 -> 3 is replaced."""

    LAUNCH = Launch(7, (1, 1, 1), (32, 1, 1), 0, (bytes(8),))

    def editor(self, plain=True):
        api = SimpleNamespace(CUDA_KERNEL_NODE_PARAMS=SimpleNamespace, CUfunction=int)
        driver = mock.Mock(api=api, **{"add_kernel.return_value": 4})
        edges = [Edge(1, 2, plain), Edge(2, 3, True)]
        return driver, Editor(driver, 99, Structure([1, 2, 3], [0, 1, 0], edges))

    def test_new_node_has_the_edges_of_the_old_one(self):
        driver, editor = self.editor()
        editor.replace(2, self.LAUNCH)
        self.assertEqual(driver.add_kernel.call_args.args[:2], (99, [1]))
        driver.add_edges.assert_called_once_with(99, [(4, 3)])
        driver.destroy.assert_called_once_with(2)
        self.assertEqual(editor.after, {1: {4: None}, 4: {3: None}, 3: {}})

    def test_graph_is_as_it_was_if_it_fails(self):
        driver, editor = self.editor()
        driver.add_edges.side_effect = DriverError("cuGraphAddDependencies", 1, "no")
        with self.assertRaises(DriverError):
            editor.replace(2, self.LAUNCH)
        driver.destroy.assert_called_once_with(4)
        self.assertEqual(editor.after, {1: {2: None}, 2: {3: None}, 3: {}})

    def test_node_with_a_programmatic_edge(self):
        driver, editor = self.editor(plain=False)
        with self.assertRaisesRegex(Refusal, "programmatic"):
            editor.replace(2, self.LAUNCH)
        driver.add_kernel.assert_not_called()


@unittest.skipUnless(has_triton_package(), "needs Triton")
class TestKernels(TestCase):
    """Launches run on memory of the host: Triton interprets the kernels' bodies."""

    def setUp(self):
        super().setUp()
        memory = torch.randint(0, 255, (65536,), dtype=torch.uint8)
        self.memory = memory[-memory.data_ptr() % 16 :]  # address 0 of a test

    def launch(self, make, *args):
        """Make a launch for addresses in the memory, and run it as its bytes say."""
        from torch._inductor.cudagraph_relaunch import fill_copy_kernels as kernels
        from triton.runtime.interpreter import InterpretedFunction

        with (
            mock.patch.object(kernels, "_device", return_value=0),
            mock.patch.object(kernels, "_function") as function,
        ):
            launch = getattr(kernels, make)(*args)
        kind, element, aligned, _ = function.call_args.args
        source = kernels.source(kind, element, aligned)
        dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[element]
        found = []
        for data, letters in zip(launch.arguments[:3], source.signature.values()):
            value = int.from_bytes(data, "little", signed=True)
            if aligned and letters != "i32":
                self.assertEqual(value % 16, 0)
            if letters.startswith("*"):
                self.assertEqual((letters, value % element), (f"*i{8 * element}", 0))
                size = (len(self.memory) - value) // element * element
                value = self.memory[value : value + size].view(dtype)
            found.append(value)
        kernel = InterpretedFunction(source.fn.fn)
        kernel[launch.grid](*found, *source.constants.values())

    def test_fill(self):
        for size in (1, 2, 4):
            for target in (16 - size, 16, 16 + size):
                for count in (1, 3, 4, 64, 1024, 2500, 8192):
                    wanted = self.memory.clone()
                    cut = (0x8765437F % (1 << 8 * size)).to_bytes(size, "little")
                    end = target + size * count
                    wanted[target:end] = torch.tensor(list(cut * count))
                    self.launch("fill", target, 0x8765437F, size, count)
                    self.assertEqual(self.memory, wanted)
                    self.memory.random_(0, 255)

    def test_copy(self):
        for target in (0, 1, 4, 16):
            for source in (32768, 32769, 32772):
                for size in (1, 5, 64, 1024, 4096, 10000, 16384):
                    wanted = self.memory.clone()
                    wanted[target : target + size] = wanted[source : source + size]
                    self.launch("copy", target, source, size)
                    self.assertEqual(self.memory, wanted)
                    self.memory.random_(0, 255)

    def test_memory_that_triton_declares(self):
        import triton
        from torch._inductor.cudagraph_relaunch import fill_copy_kernels as kernels
        from triton.backends.compiler import GPUTarget

        target, source = GPUTarget("cuda", 90, 32), kernels.source("fill", 4, True)
        made = triton.compile(source, target=target, options=kernels.OPTIONS).metadata
        self.assertEqual((made.num_warps, made.shared), (kernels.WARPS, 0))
        self.assertEqual(made.global_scratch_size, 0)


if __name__ == "__main__":
    run_tests()
