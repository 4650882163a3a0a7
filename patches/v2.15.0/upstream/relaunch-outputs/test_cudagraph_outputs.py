# Owner(s): ["module: inductor"]

import math

import torch
from torch._inductor.cudagraph_relaunch.exact import exact
from torch._inductor.cudagraph_relaunch.outputs import (
    Empty,
    Given,
    Layout,
    OfInput,
    OfStorage,
    Repeated,
    SameInput,
    Storage,
    View,
    view_of,
)
from torch.testing._internal.common_utils import run_tests, TestCase


def vector(size, dtype=torch.float32, offset=0):
    return View((size,), (1,), dtype, offset)


def launch(layout, inputs):
    """Make the outputs of a call by the layout, as a launcher would."""
    saved = torch.empty(layout.saved_size, dtype=torch.uint8)
    storages = []
    for number, storage in enumerate(layout.storages):
        if storage.saved:
            made = saved[storage.offset : storage.offset + storage.size]
        else:
            size, stride, dtype = layout.allocation(number)
            made = torch.empty_strided(size, stride, dtype=dtype)
        storages.append(made)
    outputs = []
    for recipe in layout.recipes:
        match recipe:
            case Given(value):
                outputs.append(value)
            case Repeated(output):
                outputs.append(outputs[output])
            case SameInput(position):
                outputs.append(inputs[position])
            case OfInput(position, view):
                outputs.append(see(inputs[position], view))
            case OfStorage(number, view):
                outputs.append(see(storages[number], view))
            case Empty(view):
                outputs.append(torch.empty(view.size, dtype=view.dtype))
    return outputs


def see(tensor, view):
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size() + view.offset
    made = torch.empty(0, dtype=view.dtype)
    at = start // view.dtype.itemsize
    return made.set_(storage, at, view.size, view.stride)


def ends(tensor):
    start = tensor.data_ptr()
    return start, start + view_of(tensor).extent


class TestView(TestCase):
    def test_extent(self):
        x = torch.empty(6, 4, dtype=torch.float64)
        cases = ((x, 24), (x[:, :2], 22), (x.T, 24), (x[:, 2:2], 0), (x[0, 0], 1))
        for tensor, elements in cases:
            self.assertEqual(view_of(tensor).extent, 8 * elements)
        expanded = torch.empty(1, dtype=torch.int16).expand(5)
        self.assertEqual(view_of(expanded).extent, 2)


class TestLayout(TestCase):
    # Two inputs; output 0 is a matrix, 1 and 2 are parts of one storage that is
    # larger than both, 3 and 4 are saved, 5 is a view of an input.
    layout = Layout(
        inputs=(1, 3),
        storages=(
            Storage(256),
            Storage(1000),
            Storage(600, saved=True, offset=0),
            Storage(40, saved=True, offset=1024),
        ),
        recipes=(
            OfStorage(0, View((8, 8), (1, 8), torch.float32)),
            OfStorage(1, vector(10)),
            OfStorage(1, vector(5, torch.float64, offset=960)),
            OfStorage(2, vector(150)),
            OfStorage(3, vector(5, torch.int64)),
            OfInput(3, vector(2, offset=8)),
            SameInput(1),
            Repeated(0),
            Given(7),
            Empty(vector(0)),
        ),
        scratch=(4096, 100),
    )

    def test_outputs_of_a_call(self):
        inputs = [None, torch.zeros(3), None, torch.arange(4.0)]
        outputs = launch(self.layout, inputs)
        for output, recipe in zip(outputs, self.layout.recipes):
            if isinstance(recipe, (OfStorage, OfInput)):
                view = recipe.view
                self.assertEqual(output.size(), view.size)
                self.assertEqual(output.stride(), view.stride)
                self.assertEqual(output.dtype, view.dtype)
        self.assertEqual(outputs[5], torch.tensor([2.0, 3.0]))
        self.assertIs(outputs[6], inputs[1])
        self.assertIs(outputs[7], outputs[0])
        self.assertEqual(outputs[8:], [7, torch.empty(0)])
        taken = sorted(ends(output) for output in outputs[:5])
        for (_, end), (start, _) in zip(taken, taken[1:]):
            self.assertLessEqual(end, start)

    def test_second_call_has_memory_of_its_own(self):
        inputs = [None, torch.zeros(3), None, torch.arange(4.0)]
        first, second = (launch(self.layout, inputs)[:5] for _ in range(2))
        for output in first:
            output.zero_()
        for output in second:
            output.fill_(1)
        self.assertTrue(all(not output.any() for output in first))

    def test_storage_is_allocated_as_an_output_that_spans_it(self):
        self.assertEqual(self.layout.allocation(0), ((8, 8), (1, 8), torch.float32))
        self.assertEqual(self.layout.allocation(1), ((1008,), (1,), torch.uint8))
        chunk = Layout((), (Storage(64, dtype=torch.float16),), (), ())
        self.assertEqual(chunk.allocation(0), ((32,), (1,), torch.float16))

    def test_regions(self):
        self.assertEqual(self.layout.own, (0, 1))
        self.assertEqual(self.layout.saved_region, 4)
        self.assertEqual(self.layout.scratch_region, 5)
        self.assertEqual(self.layout.saved_size, 1024 + 512)
        self.assertEqual(self.layout.scratch_size, 4096 + 512)
        names = ["input 1", "input 3", "output 0", "output 1, 2", "saved", "scratch"]
        self.assertEqual(self.layout.names(), dict(enumerate(names)))

    def test_largest_is_allocated_first(self):
        scratch, saved, second, first = 3, 2, 1, 0
        self.assertEqual(self.layout.order, (scratch, saved, second, first))
        nothing = Layout((), (Storage(0), Storage(8)), (), ())
        self.assertEqual(nothing.order, (1, 0))  # no slab that has no bytes


class TestConstants(TestCase):
    VALUES = (True, 1, 1.0, 0.0, -0.0, math.nan, "1", None, 1j, (1,), (1.0,), [1])

    def test_type_and_bits(self):
        for i, a in enumerate(self.VALUES):
            for j, b in enumerate(self.VALUES):
                self.assertEqual(exact(a) == exact(b), i == j, f"{a!r}, {b!r}")
                self.assertEqual(Given(a) == Given(b), i == j, f"{a!r}, {b!r}")
        self.assertEqual(exact(float("nan")), exact(math.nan))

    def test_tensors_are_equal_at_one_place(self):
        x = torch.zeros(4)
        self.assertEqual(Given(x), Given(x.view(4)))
        for other in (x.clone(), x[:3], x.view(2, 2), x.view(torch.int32), 0.0):
            self.assertNotEqual(Given(x), Given(other))


if __name__ == "__main__":
    run_tests()
