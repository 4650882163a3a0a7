"""`_inductor.relaunch.sizes.any_size`: what one graph for all sizes takes, and what it refuses."""

import contextlib
import mmap
import random
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase
from torch.utils._python_dispatch import _disable_current_modes

import form  # noqa: F401
from torch_overlay._inductor.relaunch.capture import capture as captures
from torch_overlay._inductor.relaunch.capture.allocations import ALLOCATOR, Plan
from torch_overlay._inductor.relaunch.capture.capture import Capture
from torch_overlay._inductor.relaunch.compiled_code import Code
from torch_overlay._inductor.relaunch.memory.outputs import OfStorage, view_of
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate, Unfit
from torch_overlay._inductor.relaunch.numbers.program import Result
from torch_overlay._inductor.relaunch.numbers.shapes import Shapes
from torch_overlay._inductor.relaunch.numbers.traced import Escaped
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode
from torch_overlay._inductor.relaunch.proof.prove import prove
from torch_overlay._inductor.relaunch.sizes.any_size import arrange_any_size


CPU, CODE = torch.device("cpu"), Code("a region", 0)
VIEW = "reinterpret_tensor"


def flat(address, count):
    size = 4 * count
    storage = torch._C._construct_storage_from_data_pointer(address, CPU, size)
    return torch.empty(0).set_(storage, 0, (count,), (1,))


# Kernels get a grid of blocks of 4 elements, addresses, and how many elements there are.
def scale(grid, x, out, k, n):
    n = min(n, 4 * grid[0])
    flat(out, n).copy_(flat(x, n) * k)


def add(grid, x, y, out, n):
    n = min(n, 4 * grid[0])
    flat(out, n).copy_(flat(x, n) + flat(y, n))


FUNCTIONS = {1: scale, 2: add}


class Recording:
    """Addresses in a block of memory, and the kernels that are launched there."""

    device, random, fixed = CPU, False, ()

    def __init__(self, gap):
        memory = mmap.mmap(-1, 1 << 20)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.low = self.memory.data_ptr()
        self.next, self.gap = self.low + 4096, 256 * gap
        self.high, self.taken, self.launched = self.low + (1 << 20), [], []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def place(self, view, alignment=256):
        at = self.next
        self.next = -(-(at + view.extent + self.gap) // 256) * 256
        self.taken.append((at, view.extent))
        with _disable_current_modes():  # generated code allocates by no operator
            return flat(at, view.extent // 4).as_strided(view.size, view.stride)

    def capturing(self, inputs, random):
        return torch.no_grad()

    def noting_lines(self, namespace):
        return contextlib.nullcontext()

    def clear_stack(self):
        pass

    def covers(self, address):
        return self.low <= address < self.high

    def segments(self):
        return self.taken

    def kept(self):
        return []

    def nodes(self):
        return [*range(len(self.launched))]

    def launch(self, func, grid, words):
        self.launched.append((func, grid, words))

    def graph(self, segments):
        nodes = [
            KernelNode(
                i,
                i,
                FUNCTIONS[func].__name__,
                func,
                0,
                0,
                grid,
                (32, 1, 1),
                0,
                tuple((8 * k, word.to_bytes(8, "little")) for k, word in enumerate(words)),
            )
            for i, (func, grid, words) in enumerate(self.launched)
        ]
        edges = [(i, i + 1) for i in range(len(nodes) - 1)]
        return CapturedGraph(tuple(nodes), tuple(edges), tuple(segments), self.low, self.high)


class Kernel:
    """What generated code has as a global: its launcher computes a grid of n."""

    def __init__(self, func, names, letters):
        self.func, self.arg_tys, self.recording = func, letters, None
        scope = {"runner": self.launch}
        text = f"def launcher({names}, stream):\n    runner(-(n // -4), 1, 1, stream, {names})"
        exec(text, scope)
        scope["launcher"]._is_static = True
        self.launchers = [scope["launcher"]]

    def run(self, *args, stream):
        self.launchers[0](*args, stream=stream)

    def launch(self, x, y, z, stream, *args):
        words = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in args]
        self.recording.launch(self.func, (x, y, z), words)


REGION = """x, n, m = args
args.clear()
a = new((n, m), (m, 1), f32)
scale.run(x, a, 2, n * m, stream=0)
b = new((1 + 2 * n, m), (m, 1), f32)
scale.run(a, view(b, (n, m), (m, 1), 0), 3, n * m, stream=0)
add.run(x, a, view(b, (n, m), (m, 1), n * m), n * m, stream=0)
del x
scale.run(a, view(b, (1, m), (m, 1), 2 * n * m), 5, m, stream=0)
c = new((m, n), (n, 1), f32)
scale.run(a, c, 7, n * m, stream=0)
del a
d = new((n * m,), (1,), f32)
scale.run(c, d, 1, n * m, stream=0)
e = new((m,), (1,), f32)
scale.run(d, e, 1, m, stream=0)
return e, b, view(b, (n + 1, m), (m, 1), n * m), n + m, None"""


def expected(x, n, m):
    a = 2 * x
    b = torch.cat([3 * a, x + a, 5 * a[:1]])
    return 7 * a.flatten()[:m], b, b[n:], n + m, None


class TestAnySize(TestCase):
    def setUp(self):
        super().setUp()
        tensors = mock.Mock(side_effect=lambda value: isinstance(value, torch.Tensor))
        self.enterContext(mock.patch.object(captures, "is_region", tensors))
        self.kernels = {
            "scale": Kernel(1, "x, out, k, n", "OOll"),
            "add": Kernel(2, "x, y, out, n", "OOOl"),
        }

    def arrange(self, text=REGION, sizes=((3, 5), (7, 2)), outputs=(1, 3, 4), **options):
        """Arrange a region of a tensor and two numbers from captures of two sizes."""
        for old, new in (
            ("new(", f"{ALLOCATOR}("),
            ("view(", f"{VIEW}("),
            ("\n", "\n    "),
        ):
            text = text.replace(old, new)
        scope = {"torch": torch, "f32": torch.float32, **self.kernels}
        scope[VIEW] = torch._C._dynamo.guards._reinterpret_tensor
        scope[ALLOCATOR] = mock.Mock(side_effect=AssertionError("it is observed"))
        exec(f"def call(args):\n    {text}", scope)
        inputs, alignments = [torch.empty(sizes[0]), *sizes[0]], [16, 1, 1]
        self.recordings, made = [], []
        for gap, size in enumerate(sizes, start=1):
            recording = Recording(gap)
            self.recordings.append(recording)
            for kernel in self.kernels.values():
                kernel.recording = recording
            given = (
                scope["call"],
                inputs,
                alignments,
                Plan(frozenset(outputs)),
                recording,
            )
            made.append(
                Capture(
                    *given,
                    numbers={1: size[0], 2: size[1]},
                    shapes=Shapes(),
                    views={0: view_of(torch.empty(size))},
                ).run(options.get("code", CODE))
            )
        graphs = [r.graph(c.segments) for r, c in zip(self.recordings, made)]
        return arrange_any_size(*made, graphs, lambda graphs: prove(*graphs))

    def launch(self, made, x, n, m):
        """Launch an arrangement as the launcher in C does."""
        arrangement, sized = made
        layout, template, numbers = arrangement.layout, arrangement.template, (x, n, m)
        slots = [slot.expression for slot in template.numbers]
        values = [evaluate(e, numbers) for e in (*slots, *sized.expressions)]

        def plain(value):
            if isinstance(value, tuple):
                return tuple(map(plain, value))
            return values[value] if isinstance(value, Result) else value

        storages = [
            torch.empty_strided(plain(size), plain(stride), dtype=dtype) for size, stride, dtype in sized.allocations
        ]
        count = layout.scratch_size if sized.scratch is None else plain(sized.scratch)
        self.scratch = torch.empty(count, dtype=torch.uint8)
        base = [t.data_ptr() for t in (x, *storages)] + [0, self.scratch.data_ptr()]
        base += [base[region] + plain(begin) for region, begin in sized.derived]
        self.assertEqual(template.regions, len(base))
        for node in template.nodes:
            words = [int.from_bytes(value, "little") for _, value in node.parameters]
            grid = list(node.grid)
            for slot in template.slots:
                if slot.node == node.index:
                    words[slot.parameter] = base[slot.region] + slot.delta
            for slot, value in zip(template.numbers, values):
                if slot.node == node.index and slot.parameter < 0:
                    grid[-1 - slot.parameter] = value
                elif slot.node == node.index:
                    words[slot.parameter] = value
            FUNCTIONS[node.func](grid, *words)
        results = []
        for output, recipe in enumerate(layout.recipes):
            if isinstance(recipe, OfStorage):
                whole = storages[layout.own.index(recipe.storage)]
                results.append(whole.as_strided(*plain(sized.outputs[output])))
            else:
                computed = sized.outputs.get(output)
                results.append(getattr(recipe, "value", None) if computed is None else plain(computed))
        return results

    def test_drawn_sizes(self):
        made, rng = self.arrange(), random.Random(0)
        for _ in range(40):
            n, m = (rng.choice((1, 2, 3, 16, rng.randrange(1, 60))) for _ in "nm")
            x = torch.randn(n, m)
            found = self.launch(made, x, n, m)
            for have, wanted in zip(found, expected(x, n, m), strict=True):
                self.assertEqual(have, wanted, f"{n} x {m}")

    def test_scratch_shares_bins(self):
        made = self.arrange()
        n = m = 32
        self.launch(made, torch.randn(n, m), n, m)
        # a, c and d are used one after the other, of which two at a time are.
        self.assertEqual(self.scratch.numel(), 2 * 4 * n * m)

    def test_sizes_with_another_outcome(self):
        made = self.arrange(REGION.replace("del x", "k = 5 if n > 2 else 4"))
        self.launch(made, torch.randn(4, 4), 4, 4)
        with self.assertRaises(Unfit):
            self.launch(made, torch.randn(2, 4), 2, 4)

    def test_captures_that_differ(self):
        text = REGION.replace(" 5, m, stream", " 5, m + 0 * n if n > 5 else m, stream")
        with self.assertRaisesRegex(Escaped, "two calls of different sizes differ in"):
            self.arrange(text)

    def test_operators(self):
        with self.assertRaisesRegex(Escaped, "is called"):
            self.arrange(REGION.replace("del a", "torch.neg(c)"))

    def test_regions_that_can_not_be(self):
        begin = "x, n, m = args\n"
        for how, text in (
            (
                "an output is a view of an input, or empty",
                "return view(x, (n,), (1,), 0)",
            ),
            ("an output that is a float", "return n / m"),
            (
                "memory of no bytes",
                "a = new((n - n, m), (m, 1), f32)\nreturn a",
            ),
        ):
            with self.assertRaisesRegex(Escaped, how):
                self.arrange(begin + text)

    def test_kernels_of_others(self):
        def arrange():
            self.kernels["scale"].recording.launch(1, (1, 1, 1), [0, 0, 1, 0])

        self.kernels["other"] = mock.Mock(spec=[], side_effect=arrange)
        with self.assertRaisesRegex(Escaped, "no Triton kernel that generated code"):
            self.arrange(REGION.replace("del x", "other()"))
