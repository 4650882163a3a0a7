# Owner(s): ["module: inductor"]

import random
import unittest
from types import SimpleNamespace
from unittest import mock

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
    def launch(self, make, *args):
        """Run a launch on bytes: (kind, element size, arguments)."""
        from torch._inductor.cudagraph_relaunch import fill_copy_kernels as kernels

        with (
            mock.patch.object(kernels, "_device", return_value=0),
            mock.patch.object(kernels, "_function") as function,
        ):
            launch = getattr(kernels, make)(*args)
        (kind, element, aligned, _) = function.call_args.args
        first, second, count = (
            int.from_bytes(v, "little") for v in launch.arguments[:3]
        )
        self.assertEqual(launch.grid[0], -(-count // kernels.BLOCK))
        if aligned:
            self.assertEqual((first % 16, count % 16), (0, 0))
        return kind, element, first, second, count

    def test_fill(self):
        for size in (1, 2, 4):
            for target in (0, size, 16):
                for count in (1, 3, 4, 64):
                    memory = bytearray(512)
                    kind, element, at, value, n = self.launch(
                        "fill", target, 0x17F, size, count
                    )
                    value = (value % (1 << 8 * element)).to_bytes(element, "little")
                    memory[at : at + element * n] = value * n
                    wanted = bytearray(512)
                    cut = (0x17F % (1 << 8 * size)).to_bytes(size, "little")
                    wanted[target : target + size * count] = cut * count
                    self.assertEqual((kind, memory), ("fill", wanted))

    def test_copy(self):
        for target, source, size in (
            (0, 256, 64),
            (4, 256, 64),
            (1, 256, 64),
            (0, 257, 5),
        ):
            kind, element, *ends, n = self.launch("copy", target, source, size)
            self.assertEqual(
                (kind, ends, element * n), ("copy", [target, source], size)
            )
            self.assertTrue(all(at % element == 0 for at in ends))

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
