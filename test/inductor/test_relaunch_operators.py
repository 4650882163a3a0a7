"""Tests of what a capture learns of the memory of operators."""

import math
import types

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan, FULL, Placing, storages
from torch_overlay._inductor.relaunch.capture.capture import _is_plain


def placed(*size, skew=0):
    """A tensor that lies `skew` elements after an address that no library asks more of."""
    buffer = torch.empty(1024)
    first = -buffer.data_ptr() % FULL // buffer.itemsize + skew
    return buffer[first:][: math.prod(size)].view(size)


class TestOperators(TestCase):
    def setUp(self):
        super().setUp()
        self.asked: list[bool] = []  # of each operator: did it ask the allocator?
        self.segments: list[dict[int, int]] = []  # that the next operators have
        recording = types.SimpleNamespace(apart=self.apart)
        self.placing = Placing(AllocationPlan(dying=frozenset([0])), recording, with_uses=False)
        self.kept: list[torch.Tensor] = []
        self.function = lambda *args, **kwargs: self.kept[-1]
        self.number = 0

    def apart(self, call, asked):
        self.asked.append(asked is None)
        segments = self.segments.pop(0)
        return call(), segments, (len(segments), 1000) if asked is None else asked

    def run_one(self, *args, segments=None, **kwargs):
        """Run an operator that returns a tensor, and has segments of these bytes. Return whether the allocator was
        asked, and the bytes of the memory that isn't the result's."""
        out = torch.empty(4)
        self.kept.append(out)
        base = 1 << 50 | self.number << 32
        sizes = segments or [4096]
        self.segments.append({base + (k << 16): size for k, size in enumerate(sizes)})
        self.assertIs(self.placing.run(self.number, self.function, args, kwargs), out)
        self.number += 1
        return self.asked[-1], [self.placing.scratch[base + (k << 16)] for k in range(len(sizes))]

    def test_calls_that_are_alike(self):
        x, y = placed(3, 4), placed(3, 4)
        self.assertEqual(self.run_one(x, 1.0, [2, 3], out=None), (True, [1024]))
        self.assertEqual(self.run_one(y, 1.0, [2, 3], out=None), (False, [1024]))
        self.assertEqual(self.placing.asked, {0: (1, 1000), 1: (1, 1000)})

    def test_calls_that_are_not_alike(self):
        x = placed(3, 4)
        every = [
            (x,), (x.t(),), (x.view(torch.int32),), (x[:2],), (x, 1), (x, 1.0), (x, True), (x, None), (x, 0.0),
            (x, -0.0), (x, [1, 2]), (x, (1, 2)), (x, torch.float32), (x, x), (placed(3, 4, skew=1),),
            (placed(3, 4, skew=32),),
        ]  # fmt: skip
        for _ in range(2):
            found = [self.run_one(*args)[0] for args in every]
        self.assertEqual(found, [False] * len(every))
        self.assertEqual(self.asked, [True] * len(every) + [False] * len(every))
        self.assertEqual(self.run_one(x, dim=1)[0], True)
        self.assertEqual(self.run_one(x, other=1)[0], True)

    def test_calls_of_which_nothing_is_known(self):
        for args in ([[torch.empty(2)]], [torch.eye(2).to_sparse()], [object()]):
            self.assertEqual([self.run_one(*args)[0] for _ in range(2)], [True, True])

    def test_other_segments_than_before(self):
        x = placed(3, 4)
        self.run_one(x, segments=[4096, 512])
        self.assertEqual(self.run_one(x, segments=[512, 4096]), (False, [512, 1024]))
        self.assertEqual(self.run_one(x, segments=[8192]), (False, [8192]), "all of it may be in use")
        self.assertEqual(self.placing.asked[2], (-1, 8192))
        self.assertEqual(self.run_one(x, segments=[4096, 4096]), (False, [4096, 4096]))

    def test_zeros_without_memory_have_no_address(self):
        zeros = torch._efficientzerotensor((4,))
        self.assertEqual(storages([zeros, zeros.conj(), self.kept]), {})
        self.assertFalse(_is_plain(zeros))

    def test_plan_knows(self):
        self.placing.plan = AllocationPlan(dying=frozenset([0]), asked={0: (1, 300), 1: (1, 700)})
        x = torch.empty(3, 4)
        self.assertEqual([self.run_one(x), self.run_one(x)], [(False, [512]), (False, [1024])])
