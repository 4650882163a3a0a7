"""Tests of library calls that a capture leaves out, for they repeat earlier ones."""

import collections
import dataclasses
import random
import types
import weakref
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay._inductor.relaunch.capture import capture, library_calls, make_graph
from torch_overlay._inductor.relaunch.capture.library_calls import Differs
from torch_overlay._inductor.relaunch.capture.repeated_calls import with_repeats
from torch_overlay._inductor.relaunch.memory.packing import Life
from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    KernelNode,
    PointerSlot,
    Segment,
    Template,
    Unprovable,
)
from torch_overlay._inductor.relaunch.sizes import sizes


# Products by weights in turn, in parts of one buffer, with an operation between them. The last is like none.
LAYERS = """
def region(args):
    x, *weights, n = args
    args.clear()
    every = empty_strided_cuda((2 * n, 64), (64, 1), torch.float32)
    a = x
    for k, w in enumerate(weights):
        b = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        torch.sin(a, out=b)
        a = every[n * (k % 2):][:n] if k < 2 else empty_strided_cuda((n, 64), (64, 1), torch.float32)
        extern_kernels.mm(b, w, out=a)
        del b
    last = empty_strided_cuda((64, 64), (64, 1), torch.float32)
    extern_kernels.mm(a.t(), x, out=last)
    return (a, last, every, n)
"""


def expected(x, weights):
    made, a = [], x
    for w in weights:
        a = torch.sin(a) @ w
        made.append(a)
    return a, a.t() @ x, torch.cat(made[:2])


class RepeatedCallsTestCase(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(sizes, "OWN", 1))
        self.weights = [torch.randn(64, 64) / 8 for _ in range(4)]
        self.operations: list[int] = []  # of each capture
        run_capture = capture.Capture.run

        def run(this, code):
            captured = run_capture(this, code)
            self.operations.append(len(captured.recording.operations))
            return captured

        self.enterContext(mock.patch.object(capture.Capture, "run", run))

    def leaves(self, **functions):
        """Libraries whose calls may be left out."""
        made = (*library_calls.LEAVES, *functions.values())
        self.enterContext(mock.patch.object(library_calls, "LEAVES", made))
        return types.SimpleNamespace(mm=torch.mm, **functions)

    def layers(self, **options):
        return self.runner(LAYERS, extern_kernels=options.pop("libraries", None) or self.leaves(), **options)

    def call(self, run, n):
        x = torch.randn(n, 64)
        *have, size = run([x, *self.weights, n])
        self.assertEqual(size, n)
        for one, want in zip(have, expected(x, self.weights), strict=True):
            self.assertEqual(one, want, f"size {n}")

    def allocator(self):
        """A product with a workspace of its own, and an operator whose results live in memory that was allocated. What
        was freed is allocated next in the same pool."""
        free = collections.defaultdict(list)

        def take(n):
            """Return n rows, and a function that frees them."""
            recording = getattr(self.device.thread, "recording", None)
            if recording is None:
                return torch.empty(n, 64), lambda: None
            mine = free[recording, recording.pool, n]
            part = mine.pop() if mine else recording.allocate((n, 64), (64, 1), torch.float32)
            return part, lambda: mine.append(part)

        def mm(x, w, *, out):
            part, frees = take(len(x))
            torch.mm(x, w, out=part)
            torch.add(part, 0, out=out)
            frees()
            return out

        def twice(x):
            part, frees = take(len(x))
            result = torch.mul(x, 2, out=part).view(part.size())
            weakref.finalize(result, frees)
            return result

        return mm, twice

    def grow(self, run, count, call=None):
        """Call further sizes twice each, and all in turn. Return the operations of each capture of theirs."""
        call = call or self.call
        for n in (2, 2, 3, 3, 4, 4, 5, 5):  # the first, and those that show that executables fit
            call(run, n)
        del self.operations[:]
        for n in range(6, 6 + count):
            call(run, n)
            call(run, n)
        found = list(self.operations)
        for n in random.Random(5).sample(range(2, 6 + count), 4 + count):
            call(run, n)
        self.assertEqual(self.operations, found)
        return found


class TestLayers(RepeatedCallsTestCase):
    def test_one_of_all_calls_that_are_alike_is_made(self):
        run = self.layers()
        self.assertEqual(self.grow(run, 6), [4 + 2] * 6, "four sines, the first product, and the last")
        self.assertEqual([graph.nodes for graph in run.graphs()], [9] * 10)
        self.assertEqual(run.states.sizes.instantiated, 1)

    def test_each_launch_is_compared(self):
        self.assertEqual(self.grow(self.layers(verify=True), 3), [6] * 3)

    def test_clusters(self):
        run = self.layers()
        self.call_with_clusters(lambda n: self.call(run, n), range(2, 16))
        self.assertEqual(self.operations[-6:], [6] * 6)
        for n in (3, 15, 9, 15, 2, 12):
            self.call(run, n)

    def test_alignment_tells_calls_apart(self):
        source = """
def region(args):
    x, w, n = args
    args.clear()
    made = []
    for offset in (0, 16, 0, 16, 128, 128):
        buffer = empty_strided_cuda((n * 64 + 128,), (1,), torch.float32)
        extern_kernels.mm(x, w, out=buffer.as_strided((n, 64), (64, 1), offset))
        made.append(buffer[offset:][: n * 64])
    return tuple(made)
"""
        run = self.runner(source, extern_kernels=self.leaves())

        def call(run, n):
            x = torch.randn(n, 64)
            for have in run([x, self.weights[0], n]):
                self.assertEqual(have.view(n, 64), x @ self.weights[0])

        self.assertEqual(self.grow(run, 2, call), [2] * 2, "512 bytes are as much as none, 64 are less")

    def test_places_between_aligned_ones_tell_calls_apart(self):
        def lead(a, *, out):
            return torch.add(a, a.data_ptr() % 64 // 4, out=out)

        source = """
def region(args):
    x, n = args
    args.clear()
    made = []
    for offset in (4, 12, 20, 28):
        a = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        b = empty_strided_cuda((n * 64 + 32,), (1,), torch.float32)
        torch.mul(x, 1, out=b[offset:][: n * 64].view(n, 64))
        extern_kernels.lead(b[offset:][: n * 64].view(n, 64), out=a)
        made.append(a)
    return tuple(made)
"""
        run = self.runner(source, extern_kernels=self.leaves(lead=lead))

        def call(run, n):
            x = torch.randn(n, 64)
            for have, want in zip(run([x, n]), (4, 12, 4, 12), strict=True):
                self.assertEqual(have, x + want)

        self.grow(run, 2, call)

    def test_numbers_tell_calls_apart(self):
        def scale(a, factor, *, out):
            return torch.mul(a, factor, out=out)

        source = """
def region(args):
    x, n = args
    args.clear()
    made = []
    for factor in (1.0, 2.0, 1, 0.0, -0.0, 1.0, True):
        a = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        extern_kernels.scale(x, factor, out=a)
        made.append(a)
    return tuple(made)
"""
        run = self.runner(source, extern_kernels=self.leaves(scale=scale))

        def call(run, n):
            x = torch.randn(n, 64)
            for factor, have in zip((1.0, 2.0, 1, 0.0, -0.0, 1.0, True), run([x, n]), strict=True):
                want = x * factor
                self.assertTrue(torch.equal(have.view(torch.int32), want.view(torch.int32)), f"{factor!r}")

        self.assertEqual(self.grow(run, 2, call), [6] * 2, "only the second 1.0 is left out")

    def test_function_never_seen(self):
        def twice(a, n, *, out):
            return torch.add(a, a, out=out) if n < 7 else torch.mul(a, 2, out=out)

        source = LAYERS.replace("extern_kernels.mm(b, w, out=a)", "extern_kernels.twice(b, n, out=a)")
        run = self.runner(source, extern_kernels=self.leaves(twice=twice))

        def call(run, n):
            x = torch.randn(n, 64)
            want = x
            for _ in range(4):
                want = 2 * torch.sin(want)
            self.assertEqual(run([x, *self.weights, n])[0], want)

        self.assertEqual(self.grow(run, 4, call), [6] * 4)

    def test_function_never_seen_that_no_library_launches(self):
        source = LAYERS.replace("torch.sin(a, out=b)", "torch.sin(a, out=b) if n < 7 else torch.cos(a, out=b)")
        run = self.runner(source, extern_kernels=self.leaves())

        def call(run, n):
            x = torch.randn(n, 64)
            want = x
            for w in self.weights:
                want = (torch.sin if n < 7 else torch.cos)(want) @ w
            self.assertEqual(run([x, *self.weights, n])[0], want)

        self.assertEqual(self.grow(run, 3, call), [6, 6, 9, 9, 6], "7 is captured twice as a whole")

    def test_error_of_a_capture_that_leaves_out_calls(self):
        for error in (IndexError("list index out of range"), Unprovable("nodes", "other nodes")):
            run = self.layers()
            with mock.patch.object(make_graph, "with_repeats", side_effect=error):
                self.assertEqual(self.grow(run, 2), [6, 9] * 2, "each is made again as a whole")
            self.assertEqual(run.refusals, {})

    def test_two_tensors_of_one_buffer(self):
        source = LAYERS.replace("extern_kernels.mm(b, w, out=a)", "extern_kernels.mm(b, w[:64], out=a)").replace(
            "x, *weights, n = args", "x, w, n = args\n    weights = [w] * 4"
        )
        source = source.replace("extern_kernels.mm(b, w[:64], out=a)", "extern_kernels.mm(w[64:], w[:64], out=a[:64])")
        run = self.runner(source, extern_kernels=self.leaves())
        w = torch.randn(128, 64) / 8

        def call(run, n):
            n += 64
            x = torch.randn(n, 64)
            self.assertEqual(run([x, w, n])[0][:64], w[64:] @ w[:64])

        whole = [9] * (sizes.DIFFERED + 2)
        parts = [k for n in whole[: sizes.DIFFERED] for k in (6, n)] + whole[sizes.DIFFERED :]
        self.assertEqual(self.grow(run, sizes.DIFFERED + 2, call), parts)

    def test_same_tensor_twice(self):
        source = LAYERS.replace("extern_kernels.mm(b, w, out=a)", "extern_kernels.mm(w, w, out=a[:64])")
        run = self.runner(source, extern_kernels=self.leaves())

        def call(run, n):
            n += 64
            x = torch.randn(n, 64)
            self.assertEqual(run([x, *self.weights, n])[0][:64], self.weights[3] @ self.weights[3])

        self.assertEqual(self.grow(run, 2, call), [9] * 2)


class TestWorkspaces(RepeatedCallsTestCase):
    def through(self, keeps):
        """A library that computes in a workspace of its own: of each call, or of the first call in a capture."""
        kept = {}

        def mm(x, w, *, out):
            recording = getattr(self.device.thread, "recording", None)
            if recording is None:
                return torch.mm(x, w, out=out)
            if keeps and recording in kept:
                part = kept[recording]
            else:
                part = kept[recording] = recording.allocate(out.size(), (64, 1), torch.float32)
            if not keeps:
                del kept[recording]
            torch.mm(x, w, out=part)
            return torch.add(part, 0, out=out)

        return mm

    # Memory that is made after the first product, and dies before the last one: it may not lie in the workspace.
    BACKWARD = """
def region(args):
    x, *weights, n = args
    args.clear()
    a = x
    del x
    while weights:
        w = weights.pop()
        b = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        torch.sin(a, out=b)
        a = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        extern_kernels.mm(b, w, out=a)
        c = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        torch.add(b, a, out=c)
        del b, w
        torch.sub(c, a, out=a)
        del c
    return (a,)
"""

    def backward(self, run, n):
        x = torch.randn(n, 64)
        want = x
        for _ in range(4):
            want = torch.sin(want)
        made = run([x, *[torch.randn(64, 64) for _ in range(4)], n])  # which die in it
        self.assertEqual(made[0], want, atol=1e-4, rtol=1e-4)

    def check(self, keeps):
        libraries = self.leaves()
        libraries.mm = self.through(keeps)
        self.enterContext(mock.patch.object(library_calls, "LEAVES", (libraries.mm,)))
        run = self.runner(self.BACKWARD, is_backward=True, extern_kernels=libraries)
        self.assertEqual(self.grow(run, 4, self.backward), [3 * 4 + 2] * 4)
        return run

    def test_of_each_call(self):
        self.check(keeps=False)

    def test_of_the_first_call(self):
        self.check(keeps=True)

    def mixed(self, mm, twice):
        """A region of products and an operator that returns memory of its own."""
        source = """
def region(args):
    x, w, n = args
    args.clear()
    made = []
    a = twice(x)
    for _ in range(3):
        b = empty_strided_cuda((n, 64), (64, 1), torch.float32)
        extern_kernels.mm(a, w, out=b)
        a = twice(b)
        made.append(a)
        del b
    last = empty_strided_cuda((n, 64), (64, 1), torch.float32)
    torch.mul(made.pop(), 1, out=last)
    while made:
        torch.add(last, made.pop(), out=last)
    return (last,)
"""
        self.enterContext(mock.patch.object(library_calls, "LEAVES", (mm,)))
        run = self.runner(source, extern_kernels=types.SimpleNamespace(mm=mm), twice=twice)

        def call(run, n):
            x, w = torch.randn(n, 64), torch.randn(64, 64) / 8
            a, want = 2 * x, 0
            for _ in range(3):
                a = 2 * (a @ w)
                want = want + a
            self.assertEqual(run([x, w, n])[0], want, f"size {n}", atol=1e-4, rtol=1e-4)

        return self.grow(run, 4, call)

    def test_that_another_operator_gets_afterwards(self):
        mm, twice = self.allocator()
        self.assertEqual(self.mixed(mm, twice), [4 + 2 + 3] * 4)

    def test_beside_tensors_that_are_given(self):
        """The first operator took the segment, in which the workspace and later results lie."""
        segments = {}

        def part():
            recording = getattr(self.device.thread, "recording", None)
            if recording is None:
                return torch.empty(self.n, 64)
            if recording not in segments:
                parts = recording.allocate((self.n * 5, 64), (64, 1), torch.float32).chunk(5)
                segments[recording] = [parts[k] for k in (1, 0, 2, 3, 4)]  # the workspace is the second
            return segments[recording].pop(0)

        workspaces = {}

        def mm(x, w, *, out):
            recording = getattr(self.device.thread, "recording", None)
            if recording not in workspaces:
                workspaces[recording] = part()
            torch.mm(x, w, out=workspaces[recording][: len(x)])
            return torch.add(workspaces[recording][: len(x)], 0, out=out)

        def twice(x):
            self.n = len(x)
            return torch.mul(x, 2, out=part()[: len(x)])

        workspaces[None] = torch.empty(64, 64)
        whole = 4 + 6 + 3
        self.assertEqual(self.mixed(mm, twice), [whole - 4, whole] * sizes.DIFFERED)

    def test_in_stages(self):
        self.cut_into_stages()
        run = self.check(keeps=False)
        self.assertGreater(len(run.states[(8,)].relaunch.stages), 1)

    def test_kept_in_stages(self):
        self.cut_into_stages()
        self.check(keeps=True)


def kernel(index, *pointers):
    words = tuple([(8 * k, pointer.to_bytes(8, "little")) for k, pointer in enumerate(pointers)])
    return KernelNode(index, 70 + index, f"k{index}", 1, 0, 0, (1, 1, 1), (1, 1, 1), 0, words)


class TestWithRepeats(TestCase):
    """A capture of one call, of nodes 0 and 2 in the order 2, 0, with node 1 behind it; another such call came after
    node 1. Regions 0 to 3 are tensors, 4 is a workspace."""

    AT = [1 << 40 | k << 20 for k in range(5)]

    def setUp(self):
        super().setUp()
        segments = [Segment(address, 1 << 12, k) for k, address in enumerate(self.AT)]
        nodes = kernel(0, self.AT[1] + 64, self.AT[4] + 8), kernel(1, self.AT[2]), kernel(2, self.AT[0], self.AT[4])
        self.graph = CapturedGraph(nodes, ((0, 1), (2, 0)), tuple(segments), self.AT[0], self.AT[4] + (1 << 20))
        slots = [PointerSlot(0, 0, 0, 1, 64), PointerSlot(0, 1, 0, 4, 8), PointerSlot(1, 0, 0, 2, 0)]
        self.template = Template(5, nodes, (*slots, PointerSlot(2, 0, 0, 0, 0), PointerSlot(2, 1, 0, 4, 0)))
        self.places = [
            library_calls._CapturedTensor(self.AT[k] + 64 * (k == 1), (4,), (1,), torch.int8, False) for k in (0, 1)
        ]
        self.repeat = library_calls.Repeat(0, (self.AT[2] + 256, self.AT[3]), 3, 7)
        self.lives = [Life(1 << 12, 0, None)] * 4 + [Life(1 << 12, 2, 3)]

    def expand(self, numbers=(4, 0, 1, 2, 3), **changed):
        call = library_calls.Call(torch.mm, (self.places[0],), {"out": self.places[1]}, range(2), (), False)
        captured = types.SimpleNamespace(calls=[call], repeats=[self.repeat], lives=self.lives)
        return with_repeats(captured, dataclasses.replace(self.graph, **changed), self.template, lambda nodes: numbers)

    def test_nodes_are_numbered_as_those_of_an_executable(self):
        graph, template, _ = self.expand()
        self.assertEqual([node.name for node in graph.nodes], ["k0", "k1", "k2", "k0", "k2"])
        self.assertEqual([node.index for node in graph.nodes], list(range(5)))
        self.assertEqual(graph.edges, ((0, 1), (1, 2), (2, 3), (4, 0)))
        self.assertIs(template.nodes, graph.nodes)

    def test_nodes_that_no_executable_has_keep_their_numbers(self):
        graph, template, _ = self.expand(numbers=())
        self.assertEqual([node.name for node in graph.nodes], ["k0", "k1", "k2", "k2", "k0"])
        self.assertEqual(graph.edges, ((0, 1), (1, 3), (2, 0), (3, 4)))
        found = [(slot.node, slot.parameter, slot.region, slot.delta) for slot in template.slots]
        before = [(slot.node, slot.parameter, slot.region, slot.delta) for slot in self.template.slots]
        self.assertEqual(sorted(found), sorted([*before, (3, 0, 2, 256), (3, 1, 4, 0), (4, 0, 3, 0), (4, 1, 4, 8)]))

    def test_pointers_are_those_of_the_call_that_was_left_out(self):
        _, template, _ = self.expand()
        self.assertEqual(
            sorted(template.slots),
            [(0, 0, 0, 1, 64), (0, 1, 0, 4, 8), (1, 0, 0, 2, 0), (2, 0, 0, 2, 256), (2, 1, 0, 4, 0)]
            + [(3, 0, 0, 3, 0), (3, 1, 0, 4, 8), (4, 0, 0, 0, 0), (4, 1, 0, 4, 0)],
        )

    def test_workspace_lives_until_the_call_that_was_left_out(self):
        self.assertEqual(self.expand()[2], [*self.lives[:4], Life(1 << 12, 2, 8)])
        self.lives[4] = Life(1 << 12, 2, 7)  # it was freed at the time of the call
        self.assertEqual(self.expand()[2], [*self.lives[:4], Life(1 << 12, 2, 8)])
        for freed in (8, None):
            self.lives[4] = Life(1 << 12, 2, freed)
            self.assertEqual(self.expand()[2], self.lives)

    def test_copies_of_a_node_are_launched_as_early(self):
        self.assertEqual(self.expand(partial=((2, 0),))[0].partial, ((2, 3), (4, 0)))
        self.assertEqual(self.expand(partial=((0, 1),))[0].partial, ((0, 1),))

    def test_what_differs(self):
        with self.assertRaisesRegex(Differs, "side by side"):
            self.expand(edges=((0, 1),))
        places, self.places = self.places, [self.places[0]] * 2
        with self.assertRaisesRegex(Differs, "share their memory"):
            self.expand()
        self.places = [places[0], dataclasses.replace(places[1], address=self.AT[1] + 60)]  # it ends at the pointer
        with self.assertRaisesRegex(Differs, "beside one of its tensors"):
            self.expand()
        self.places, self.repeat = places, self.repeat._replace(addresses=(self.AT[2], self.AT[3] + (1 << 14)))
        with self.assertRaisesRegex(Differs, "in no region"):
            self.expand()


@instantiate_parametrized_tests
class TestDrawn(RepeatedCallsTestCase):
    """Regions that are drawn: products and pointwise operations of what was made before, which dies at some time."""

    OPERATIONS = ("extern_kernels.mm({a}, {w}, out={c})", "torch.add({a}, {b}, out={c})", "torch.sin({a}, out={c})")

    def drawn(self, draw, with_results):
        """`with_results`: there are operators that return memory of their own, too."""
        lines, alive = [], ["x"]
        for k in range(draw.randrange(6, 14)):
            name = f"t{k}"
            if with_results and draw.random() < 0.4:
                lines.append(f"{name} = twice({draw.choice(alive)})")
                alive.append(name)
                continue
            lines.append(f"{name} = empty_strided_cuda((n, 64), (64, 1), torch.float32)")
            operation = draw.choices(self.OPERATIONS, (3, 1, 1))[0]
            names = {"a": draw.choice(alive), "b": draw.choice(alive), "w": draw.choice("wv"), "c": name}
            lines.append(operation.format(**names))
            alive.append(name)
            while len(alive) > 1 and draw.random() < 0.4:
                lines.append(f"del {alive.pop(draw.randrange(len(alive)))}")
        lines.append(f"return ({''.join(f'{name}, ' for name in alive)})")
        return region("x, w, v, n", *lines)

    def check(self, seeds, is_backward, libraries, **functions):
        """Return how many of the regions have had calls left out."""
        left_out = 0
        for seed in seeds:
            source = self.drawn(random.Random(seed), bool(functions))
            if seed % 4 == 3:
                self.cut_into_stages()
            run = self.runner(source, is_backward=is_backward(seed), extern_kernels=libraries, **functions)
            scope = {"torch": torch, "extern_kernels": types.SimpleNamespace(mm=torch.mm), "twice": lambda x: 2 * x}
            scope["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty(size, dtype=dtype)
            exec(source, scope)
            w, v = torch.randn(64, 64) / 8, torch.randn(64, 64) / 8

            def call(run, n, seed=seed, plain=scope["region"], w=w, v=v):
                x = torch.randn(n, 64)
                want = plain([x.clone(), w, v, n])
                for have, one in zip(run([x, w, v, n]), want, strict=True):
                    self.assertEqual(have, one, f"seed {seed}, size {n}", atol=1e-4, rtol=1e-4)

            found = self.grow(run, 3, call)
            left_out += max(graph.nodes for graph in run.graphs()) > max(found, default=1 << 30)
        return left_out

    @parametrize("count", form.sampled([12, 30], 2))
    def test_drawn(self, count):
        self.assertGreater(self.check(range(count), lambda seed: seed % 2 == 1, self.leaves()), count // 2)

    @parametrize("count", form.sampled([12, 30], 2))
    def test_with_results_of_operators(self, count):
        mm, twice = self.allocator()
        self.enterContext(mock.patch.object(library_calls, "LEAVES", (mm,)))
        libraries = types.SimpleNamespace(mm=mm)
        self.assertGreater(self.check(range(count), lambda seed: False, libraries, twice=twice), count // 6)
