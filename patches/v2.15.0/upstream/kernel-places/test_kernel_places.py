# Owner(s): ["module: inductor"]

import contextlib
import os
import tempfile

import torch
from torch._inductor.kernel_places import mark, place_at, place_of
from torch._inductor.user_lines import is_in_torch, source_line
from torch._inductor.utils import LineContext
from torch.fx import Graph
from torch.testing._internal.common_utils import run_tests, TestCase


def frame(path, line, text=None):
    return f'  File "{path}", line {line}, in f\n' + (f"    {text}\n" if text else "")


OURS = frame("/a/model.py", 7, "return self.mlp(x)") + frame("/a/b.py", 9, "x.sin()")
TORCH = frame(torch.nn.modules.linear.__file__, 3, "return F.linear(x)")
ENTERED = frame(contextlib.__file__, 5, "return next(self.gen)")


class TestLines(TestCase):
    def test_innermost_line_of_the_program(self):
        for trace in (OURS, OURS + TORCH, OURS + ENTERED, TORCH + OURS + TORCH):
            self.assertEqual(source_line(trace), "/a/b.py:9: x.sin()")

    def test_line_without_its_text(self):
        self.assertEqual(source_line(OURS + frame("/a/c.py", 4)), "/a/c.py:4")

    def test_no_line_is_the_programs(self):
        path = torch.nn.modules.linear.__file__
        expected = f"{path}:3: return F.linear(x)"
        self.assertEqual(source_line(ENTERED + TORCH), expected)
        self.assertEqual(source_line("no trace"), "")

    def test_files_of_torch(self):
        folder = os.path.dirname(torch.__file__)
        self.assertTrue(is_in_torch(os.path.join(folder, "fx", "graph.py")))
        self.assertFalse(is_in_torch(folder + "vision/ops.py"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])


class TestPlaces(TestCase):
    def node(self, **meta):
        node = Graph().call_function(torch.relu)
        node.meta |= {"stack_trace": OURS, **meta}
        return node

    def test_line_and_module(self):
        stack = {"1": ("L['self']", Model), "2": ("L['self'].layers.0", Model)}
        for path, module in (
            (stack, "layers.0"),
            ({"1": ("L['model'].layers.0", Model)}, "model.layers.0"),
            ({"1": ("G['model'].layers.0", Model)}, "model.layers.0"),
            ({"1": ("layers.0", Model)}, "layers.0"),
        ):
            place = place_of(self.node(nn_module_stack=path))
            self.assertEqual(place, f"b.py:9, {module}")

    def test_root_has_no_module(self):
        for stack in ({}, {"1": ("L['self']", Model)}):
            self.assertEqual(place_of(self.node(nn_module_stack=stack)), "b.py:9")

    def test_module_of_a_backward(self):
        stack = {"1": ("L['self'].layers.0", Model)}
        place = place_of(self.node(fwd_nn_module_stack=stack))
        self.assertEqual(place, "b.py:9, layers.0")

    def test_line_is_not_known(self):
        for trace in (None, "", "no trace"):
            stack = {"1": ("L['self'].layers.0", Model)}
            node = self.node(stack_trace=trace, nn_module_stack=stack)
            self.assertEqual(place_of(node), "")


class TestComments(TestCase):
    def test_each_context_is_followed_by_its_place(self):
        node = Graph().call_function(torch.relu)
        node.meta["stack_trace"] = OURS
        unknown = Graph().call_function(torch.relu)
        known, other = LineContext(node), LineContext(unknown)
        lines = ["a = 1", known, "run(a)", other, "run(b)"]
        marked = ["a = 1", known, "# Kernel of b.py:9", "run(a)", other, "run(b)"]
        self.assertEqual(mark(lines), marked)

    def test_place_above_a_line(self):
        text = """
# Kernel of outside.py:1
def partition_0(args):
    x = 1
    # Kernel of a.py:2, layers.0
    run(x)
    run(x)
        # Kernel of a.py:3
        run(x)

def partition_1(args):
    run(x)
"""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "generated.py")
            with open(path, "w") as file:
                file.write(text)
            found = [place_at(path, line) for line in range(1, 13)]
        first, second = "a.py:2, layers.0", "a.py:3"
        inside = ["", "", first, first, first, second, second, second]
        self.assertEqual(found, ["", "outside.py:1", *inside, "", ""])

    def test_code_that_is_not_there(self):
        self.assertEqual(place_at("/nowhere/generated.py", 3), "")


if __name__ == "__main__":
    run_tests()
