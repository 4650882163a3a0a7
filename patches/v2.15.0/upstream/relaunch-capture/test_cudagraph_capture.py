# Owner(s): ["module: inductor"]

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import capture as captures
from torch._inductor.cudagraph_relaunch.allocations import ALLOCATOR, Plan
from torch._inductor.cudagraph_relaunch.capture import Capture
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.nodes import FIXED, Refusal, Segment
from torch._inductor.cudagraph_relaunch.operators import GROUP
from torch._inductor.cudagraph_relaunch.outputs import (
    Computed,
    Empty,
    Given,
    OfInput,
    OfStorage,
    Repeated,
    SameInput,
    Storage,
    View,
    view_of,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._python_dispatch import _disable_current_modes


CPU = torch.device("cpu")
VECTOR = View((4,), (1,), torch.float32)
PLAN, CODE = Plan(), Code("f", 0)
IS_REGION = captures.is_region


class Recording:
    """Addresses in a block of the host's memory. `apart` finds what was placed in it, as
    if an operator had allocated it. `pools`: those that were selected."""

    device = CPU

    def __init__(self):
        self.block = torch.zeros(1 << 16, dtype=torch.uint8)
        self.low = self.next = -(-self.block.data_ptr() // 256) * 256
        self.taken, self.fixed, self.used = [], [], []
        self.launched, self.pools, self.random, self.selected = 0, [], None, 0

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def place(self, view, alignment=256):
        if not view.extent:
            return torch.empty_strided(view.size, view.stride, dtype=view.dtype)
        at = self.next + (alignment if alignment < 256 else 0)
        self.next += 1024
        self.taken.append((at, view.extent))
        storage = torch._C._construct_storage_from_data_pointer(at, CPU, view.extent)
        return torch.empty(0, dtype=view.dtype).set_(storage, 0, view.size, view.stride)

    def covers(self, address):
        return self.low <= address < self.next

    def segments(self):
        return [*self.taken]

    @contextlib.contextmanager
    def capturing(self, inputs, random):
        self.random = random
        yield

    @contextlib.contextmanager
    def apart(self, asked):
        found, before = SimpleNamespace(once=True), len(self.taken)
        yield found
        found.segments = dict(self.taken[before:])
        found.count = len(found.segments)
        found.requested = sum(found.segments.values())

    def new_pool(self):
        return object()

    @contextlib.contextmanager
    def within(self, pool):
        self.pools.append(pool)
        self.selected += 1
        try:
            yield
        finally:
            self.selected -= 1

    without_modes = staticmethod(_disable_current_modes)

    def allocations_made(self):
        return len(self.taken)

    def allocations(self, first):
        return self.taken[first:]

    def noting_lines(self, namespace):
        return contextlib.nullcontext()

    def clear_stack(self):
        pass

    def nodes(self):
        return [*range(self.launched)]

    def count(self):
        return self.launched

    def kept(self):
        return self.used


def vector(*size):
    return torch.arange(float(torch.Size(size).numel())).reshape(size)


class TestCapture(TestCase):
    def setUp(self):
        super().setUp()
        tensors = mock.Mock(side_effect=lambda value: isinstance(value, torch.Tensor))
        self.enterContext(mock.patch.object(captures, "is_region", tensors))
        self.recording = Recording()

    def capture(self, text, *inputs, plan=PLAN, code=CODE, **kwargs):
        """Capture a region, whose text is the body of call(args); new() allocates."""

        def empty(size, stride, dtype):
            return torch.empty_strided(size, stride, dtype=dtype)

        self.scope = scope = {"torch": torch, ALLOCATOR: empty, "place": self.place}
        scope["extern_kernels"] = SimpleNamespace(mm=torch.mm)
        body = text.replace("new(", f"{ALLOCATOR}(").replace("\n", "\n    ")
        exec(f"def call(args):\n    {body}", scope)
        alignments = kwargs.pop("alignments", [256] * len(inputs))
        given = scope["call"], inputs, alignments, plan, self.recording
        self.made = Capture(*given, **kwargs)
        return self.made.run(code)

    def place(self, tensor):
        """Memory of a tensor's shape that an operator allocates."""
        return self.recording.place(view_of(tensor)).copy_(tensor)

    TWO = """x, y = args
args.clear()
a = new((4,), (1,), torch.float32)
torch.add(x, y, out=a)
del x
b = new((4,), (1,), torch.float32)
torch.mul(a, y, out=b)
del a
c = new((8,), (1,), torch.float32)
return (b,)"""

    def test_inputs_that_are_regions(self):
        tensors = torch.empty(2, device="meta"), torch.empty(2), 5
        self.assertEqual([IS_REGION(value) for value in tensors], [True, False, False])

    def test_regions(self):
        self.recording.fixed = [0x5000, 0x6000]
        plan = Plan(frozenset([1]), random=True)
        found = self.capture(self.TWO, vector(4), vector(4), plan=plan)
        self.assertEqual(found.layout.inputs, (0, 1))
        self.assertEqual(found.layout.storages, (Storage(16),))
        self.assertEqual(found.layout.recipes, (OfStorage(0, VECTOR),))
        self.assertEqual(found.layout.scratch, (16, 32))
        x, y, a, b, c = (at for at, _ in self.recording.taken)
        regions = [(x, 16), (y, 16), (b, 16), (a, 16), (c, 32)]
        segments = [Segment(*each, region) for region, each in enumerate(regions)]
        fixed = Segment(0x5000, 8, FIXED, 0), Segment(0x6000, 8, FIXED, 8)
        self.assertEqual(found.segments, [*segments, *fixed])
        self.assertEqual(found.places, ((0, 0), (1, 0), (2, 0)))
        lives = [(life.made, life.freed) for life in found.lives]
        # x and a are gone when the next allocation comes, y and c are not.
        self.assertEqual(lives, [(0, 2), (0, None), (2, None), (1, 3), (3, None)])
        self.assertEqual((found.plan, self.recording.random), (plan, True))

    def test_output_in_the_scratch(self):
        found = self.capture(self.TWO, vector(4), vector(4))
        self.assertEqual(found.plan.allocations, {1})  # what the next one places
        *_, (copy, size) = self.recording.taken
        self.assertEqual((found.segments[2].address, size), (copy, 16))
        self.assertEqual(found.layout.recipes, (OfStorage(0, VECTOR),))
        self.assertEqual(found.layout.scratch, (16, 16, 32))

    def test_outputs_that_share_a_storage_in_the_scratch(self):
        found = self.capture("a = new((8,), (1,), torch.float32)\nreturn a[:4], a[4:]")
        self.assertEqual(found.layout.storages, (Storage(32),))
        views = [recipe.view for recipe in found.layout.recipes]
        self.assertEqual(views, [VECTOR, View((4,), (1,), torch.float32, 16)])

    def test_other_outputs(self):
        text = """x, n = args
a = new((4,), (1,), torch.float32)
none = new((0, 4), (4, 1), torch.float32)
return x, x[1:3], a, a, n, None, none, a[2:]"""
        found = self.capture(text, vector(4), 5, plan=Plan(frozenset([0])))
        wanted = (
            SameInput(0),
            OfInput(0, View((2,), (1,), torch.float32, 4)),
            OfStorage(0, VECTOR),
            Repeated(2),
            Given(5),
            Given(None),
            Empty(View((0, 4), (4, 1), torch.float32)),
            OfStorage(0, View((2,), (1,), torch.float32, 8)),
        )
        self.assertEqual(found.layout.recipes, wanted)
        self.assertEqual(found.layout.inputs, (0,))

    def test_stand_ins(self):
        text = "x, y = args\nassert not x.data_ptr() % 64 and x.data_ptr() % 128\n"
        x = vector(4, 6)[:, 1:3]
        text += "assert y.stride() == (6, 1) and y.dtype == torch.float32\nreturn ()"
        found = self.capture(text, vector(2), x, alignments=[64, 256])
        self.assertEqual([s.size for s in found.segments], [8, 4 * (3 * 6 + 2)])

    def test_inputs_that_are_refused(self):
        for reason, text, value in (
            ("input", "input 0 is not a plain tensor", torch.eye(2).to_sparse()),
            ("input", "input 0 is not a plain tensor", torch.ones(2) * 1j),
            ("device", "input 0 is on meta", torch.empty(2, device="meta")),
        ):
            value = value.conj() if value.is_complex() else value
            with self.assertRaisesRegex(Refusal, text) as caught:
                self.capture("return ()", value)
            self.assertEqual(caught.exception.reason, reason)

    def test_outputs_that_are_refused(self):
        for value in (
            "torch.eye(2).to_sparse()",
            "torch.empty(2, device='meta')",
            "torch.ones(2, dtype=torch.complex64).conj()",
            "torch._neg_view(torch.ones(2))",
        ):
            with self.assertRaisesRegex(Refusal, "output 0 is") as caught:
                self.capture(f"return [{value}]")
            self.assertEqual(caught.exception.reason, "output")

    def test_memory_that_is_kept(self):
        self.recording.used = [512]
        with self.assertRaisesRegex(Refusal, "512 bytes are still in use"):
            self.capture(self.TWO, vector(4), vector(4))
        self.recording.used = [8]
        with self.assertRaisesRegex(Refusal, "24 bytes that it allocated are"):
            self.capture(
                "global kept\nkept = new((4,), (1,), torch.float32)\nreturn ()"
            )
        self.recording.used = []
        keeps = "global kept\nkept = new((4,), (1,), torch.float32)\nreturn ()"
        with self.assertRaisesRegex(Refusal, "16 bytes are still in use") as caught:
            self.capture(keeps)
        self.assertEqual(caught.exception.reason, "kept")

    def library(self):
        library = torch.library._scoped_library("test_capture", "FRAGMENT")
        library = self.enterContext(library)
        for schema, function in (
            ("twice(Tensor x) -> Tensor", lambda x: self.place(x * 2)),
            ("use(Tensor(a!) x) -> ()", lambda x: (self.place(x), None)[1]),
        ):
            library.define(schema)
            name = schema.partition("(")[0]
            library.impl(name, function, "CompositeExplicitAutograd")

    def test_operator_that_allocates_an_output(self):
        self.library()
        text = "(x,) = args\nreturn torch.ops.test_capture.twice(x)"
        plan = Plan(operators=frozenset([0]))
        found = self.capture(text, vector(4), plan=plan)
        self.assertEqual(found.layout.storages, (Storage(16),))
        x, made = (at for at, _ in self.recording.taken)
        self.assertEqual([s.address for s in found.segments], [x, made])
        self.assertEqual(found.results, [(made, 16)])
        self.assertTrue(found.plan.opaque)  # it is not torch's
        self.assertEqual(found.asked, {0: (1, 16)})

    def test_workspaces_of_operators(self):
        self.library()
        n = GROUP + 2
        text = f"(x,) = args\nfor _ in range({n}): torch.ops.test_capture.use(x)"
        found = self.capture(f"{text}\nreturn ()", vector(4), plan=Plan(detail=True))
        lives = [(life.made, life.freed) for life in found.lives[1:]]
        first = [(made, n) for made in range(1, GROUP + 1)]
        self.assertEqual(lives, [*first, (n - 1, n + 1), (n, n + 1)])
        self.assertEqual(len(set(self.recording.pools)), 2)
        self.assertEqual(self.recording.selected, 0)

    def test_matrix_products_run_without_a_mode(self):
        text = "(x,) = args\nfor _ in 'ab': extern_kernels.mm(x, x, out=x)\nreturn ()"
        watch, seen = captures.Watch.__torch_dispatch__, []

        def noting(self, func, *args):
            seen.append(func)
            return watch(self, func, *args)

        with mock.patch.object(captures.Watch, "__torch_dispatch__", noting):
            for with_calls, products in ((False, 2), (True, 0)):
                seen.clear()
                options = {"plan": Plan(detail=True), "with_calls": with_calls}
                found = self.capture(text, vector(4, 4), **options)
                self.assertEqual(len(seen), products)
                self.assertEqual(len(found.calls), 2 - products)
        self.assertEqual(len(set(self.recording.pools)), 2)
        with self.assertRaises(ZeroDivisionError):
            self.capture(text.replace("return ()", "1 / 0"), vector(4, 4), **options)
        self.assertEqual((len(self.recording.pools), self.recording.selected), (3, 0))

    def test_numbers(self):
        text = "x, n = args\nreturn n, n * 2 + 1"
        found = self.capture(text, vector(2), 7, numbers={1: 7})
        recipes = found.layout.recipes
        self.assertEqual(recipes[0], Computed(("input", 1, int)))
        self.assertIsInstance(recipes[1], Computed)
        self.assertEqual((found.numbers, self.recording.launched), ({1: 7}, 0))

    def test_saved_outputs_share_memory(self):
        text = "a, b = (new((64,), (1,), torch.float32) for _ in 'ab')\nreturn a, b"
        code = Code("forward", 0, saved_outputs=frozenset([0, 1]))
        found = self.capture(text, plan=Plan(frozenset([0, 1])), code=code)
        regions = {region for region, _ in found.places}
        self.assertEqual((len(found.places), len(regions)), (2, 1))
        self.assertTrue(code.is_training)


if __name__ == "__main__":
    run_tests()
