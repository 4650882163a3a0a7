"""The pass that makes copies in the memory that the user names, by values: graphs are rewritten, run, and compared.

A copy with `non_blocking=True` stands for one between device and host here, though all of it is on the CPU, where a
graph can be run. Programs are drawn: tensors of the caller's and of their own, updates of them and of views of them,
values read in between.
"""

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings, strategies as st
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.test_case import TestCase
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

import form
from torch_overlay._inductor.streams import copies_in_place
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, MEMORY_LIKE


aten = torch.ops.aten
SHAPE = (6, 4)

VIEWS = {
    "all": lambda t: t,
    "row": lambda t: t[1],
    "rows": lambda t: t[2:5],
    "columns": lambda t: t[:, 1:3],
    "steps": lambda t: t[::2],
    "element": lambda t: t[3][2],
    "row of rows": lambda t: t[2:5][1],
    "flat": lambda t: t.view(-1)[5:11],
    "turned": lambda t: t.t()[1:3],
    "diagonal": lambda t: t.diagonal(),
}
STEPS = ("copy", "copy", "copy", "write", "add", "read", "clone", "list")

step = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 3), st.sampled_from(sorted(VIEWS)), st.integers(0, 3), st.integers(1, 9)
)


def program(steps: list[tuple[str, int, str, int, int]], returned: list[int]) -> Any:
    def fn(a: torch.Tensor, b: torch.Tensor, source: torch.Tensor) -> Any:
        tensors = [a, b, torch.zeros(SHAPE), torch.zeros(SHAPE)]
        found = []
        for kind, index, name, other, number in steps:
            view = VIEWS[name](tensors[index])
            if kind == "copy":  # sources that are updated later, too, and what another copy brought
                given = VIEWS[name](source if other == index else tensors[other])
                view.copy_(given if other == index or number == 1 else given + number, non_blocking=True)
            elif kind == "write":
                view.copy_(VIEWS[name](source) * number)
            elif kind == "add":
                view.add_(number)
            elif kind == "read":
                found.append(view * number)
            elif kind == "clone":
                tensors[2 + number % 2] = tensors[index].clone()
            else:
                rows = [tensors[index][0], tensors[index][3:5]]
                torch._foreach_copy_(rows, [source[2], source[0:2] + number], non_blocking=True)
        return found, [tensors[i].clone() if i < 2 else tensors[i] for i in returned]

    return fn


def split_lists(graph: torch.fx.Graph) -> None:
    """As `place_streams` does, which asks for the devices."""
    from torch_overlay._functorch.streams.program import split_lists

    device = torch.device("cuda")
    for node in graph.find_nodes(op="call_function", target=aten._foreach_copy.default):
        with mock.patch.dict(node.args[0][0].meta, {"val": mock.Mock(device=device)}):
            split_lists(graph)


def is_marked(node: torch.fx.Node) -> bool:
    return node.target is aten.copy.default and len(node.args) > 2 and node.args[2] is True


def rewritten(fn: Any, inputs: list[torch.Tensor], reinplaced: bool) -> torch.fx.GraphModule:
    gm = make_fx(torch.func.functionalize(fn, remove="mutations"), tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:
        if node.target is aten.copy_.default and node.args[0].op != "placeholder":
            raise AssertionError(gm.graph)
    split_lists(gm.graph)
    mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if n.op == "placeholder")
    with V.set_fake_mode(mode), mock.patch.object(copies_in_place, "is_asynchronous_copy", is_marked):
        if reinplaced:
            reinplace_inplaceable_ops(FakeTensorUpdater(gm), gm.graph)
        copies_in_place.make_copies_in_place(gm.graph)
    gm.graph.lint()
    return gm


class Run(torch.fx.Interpreter):
    def run_node(self, node: torch.fx.Node) -> Any:
        if node.target is not COPY_ASYNC:
            return super().run_node(node)
        memory, source = (self.env[n] for n in node.args)
        part, whole = node.meta[DESTINATION], node.args[0].meta["val"]
        offset = memory.storage_offset() + part.storage_offset() - whole.storage_offset()
        memory.as_strided(part.shape, part.stride(), offset).copy_(source)
        return None


class TestCopiesInPlace(TestCase):
    def compare(self, steps: list[Any], returned: list[int]) -> list[torch.fx.GraphModule]:
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randint(0, 50, SHAPE, generator=generator).float() for _ in range(3)]
        fn = program(steps, returned)
        expected = [t.clone() for t in inputs]
        wanted = fn(*expected)
        graphs = []
        for reinplaced in (False, True):
            gm = rewritten(fn, inputs, reinplaced)
            given = [t.clone() for t in inputs]
            found = Run(gm, garbage_collect_values=False).run(*given)
            self.assertEqual((found, given), (wanted, expected), str(gm.graph))
            memory = [t.untyped_storage().data_ptr() for t in (*found[1], *given)]
            self.assertEqual(len(set(memory)), 3 + len({i if i > 1 else -n for n, i in enumerate(returned)}))
            graphs.append(gm)
        return graphs

    @form.slow
    @settings(max_examples=60, deadline=None)
    @given(st.lists(step, max_size=8), st.lists(st.integers(0, 3), max_size=3, unique=True))
    def test_values_are_those_of_the_program(self, steps: list[Any], returned: list[int]) -> None:
        self.compare(steps, returned)

    def test_nothing_is_left_of_updates_of_one_memory(self) -> None:
        steps = [("copy", i, name, i, 1) for i in (0, 2) for name in VIEWS] + [("list", 0, "all", 0, 1)]
        for gm in self.compare(steps, [2]):
            targets = [n.target for n in gm.graph.nodes]
            self.assertEqual(targets.count(COPY_ASYNC), 2 * len(VIEWS) + 2, str(gm.graph))
            left = [t for t in targets if "scatter" in str(t) or t in (aten.copy.default, aten.copy_.default)]
            self.assertEqual(left, [], str(gm.graph))

    def test_old_value_that_is_read_later_stays(self) -> None:
        """Of the caller's memory, of memory of one's own, of equal memory that is made once."""
        self.compare([("clone", 0, "all", 0, 1), ("copy", 0, "row", 0, 1), ("read", 3, "all", 0, 2)], [0, 3])
        self.compare([("copy", 2, "row", 2, 1), ("clone", 2, "all", 0, 1), ("copy", 2, "rows", 2, 1)], [2, 3])
        self.compare([("copy", 3, "row", 3, 1), ("copy", 2, "rows", 2, 1), ("read", 3, "all", 0, 2)], [2, 3])

    def test_new_memory_has_no_gaps(self) -> None:
        """Of a part of memory that can't be filled in place, for it is filled once more."""
        for gm in self.compare([("copy", 0, "all", 2, 1), ("copy", 0, "columns", 0, 1)], []):
            for node in gm.graph.find_nodes(op="call_function", target=MEMORY_LIKE):
                self.assertTrue(node.meta["val"].is_contiguous())

    def test_copy_that_another_copy_reads_is_made_in_place(self) -> None:
        for gm in self.compare([("copy", 0, "all", 0, 1), ("copy", 1, "all", 0, 1), ("copy", 0, "all", 1, 2)], []):
            targets = [n.target for n in gm.graph.nodes]
            self.assertEqual((targets.count(COPY_ASYNC), targets.count(MEMORY_LIKE)), (3, 0), str(gm.graph))

    def test_copy_that_is_overwritten_before_it_is_read_is_left_out(self) -> None:
        """What the last one brings is known when it is compiled: no copy is made in place."""
        steps = [("copy", 0, "all", 0, 1), ("copy", 0, "rows", 1, 1), ("copy", 0, "all", 2, 1)]
        for gm in self.compare(steps, []):
            self.assertEqual(gm.graph.find_nodes(op="call_function", target=COPY_ASYNC), [], str(gm.graph))

    def test_source_that_is_updated_afterwards(self) -> None:
        self.compare([("copy", 0, "all", 1, 1), ("add", 1, "rows", 0, 3), ("copy", 1, "row", 0, 2)], [0, 1])
