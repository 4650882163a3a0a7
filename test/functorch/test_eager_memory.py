"""Whose memory a node's value is in eager, and which memory that eager never allocates is settled at the exit."""

import operator
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._inductor.test_case import TestCase
from torch.fx import Graph, Node
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401
from stream_programs import _ops  # noqa: F401  (registers the operators)
from stream_programs._program import fork, join
from torch_overlay._functorch.streams.facts import ForeignRead, note_fact
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.memory import MemoryTable
from torch_overlay.analysis import check
from torch_overlay.frame_facts import FrameFacts
from torch_overlay.testing import compile_only, simulated_gpu


aten = torch.ops.aten


class TestMemory(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def node(self, target: Any, *args: Any, stream: int = 0, written: Any = None, **fact: Any) -> Node:
        """An operation on a stream; `written` is what the user called."""
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        note_fact(node, **fact)
        if written is not None:
            node.meta["source_fn_stack"] = [("call", written)]
        return node

    def table(self, *results: Node) -> MemoryTable:
        output = self.graph.output(results)
        found = MemoryTable(self.graph)
        self.graph.erase_node(output)
        return found

    def stream(self, node: Node) -> int | None:
        return self.table().memory[node].stream

    def reads(self, node: Node) -> tuple[ForeignRead, ...]:
        return self.table().foreign_reads(node)

    def test_of_operations(self) -> None:
        made = self.node(aten.mm.default, self.x, self.x, stream=1)
        self.assertEqual(self.stream(made), 1)
        self.assertEqual(self.stream(self.node(aten.permute.default, made, [1, 0], stream=2)), 1)
        self.assertIsNone(self.stream(self.node(aten.permute.default, self.x, [1, 0], stream=2)))

    def test_of_updates_in_place(self) -> None:
        made = self.node(aten.mm.default, self.x, self.x)
        for written in ("add_", operator.iadd, torch.relu_):
            updated = self.node(aten.add.Tensor, made, 1, stream=1, written=written)
            self.assertEqual(self.stream(updated), 0, str(written))
        self.assertIsNone(self.stream(self.node(aten.add.Tensor, self.x, 1, stream=1, written="add_")))
        for written in ("add", "__add__", torch.relu, operator.add):
            self.assertEqual(self.stream(self.node(aten.add.Tensor, made, 1, stream=1, written=written)), 1)

    def test_of_updates_of_a_part(self) -> None:
        made = self.node(aten.mm.default, self.x, self.x)
        part = self.node(aten.add.Tensor, made, 1, stream=1)
        self.assertEqual(self.stream(self.node(aten.select_scatter.default, made, part, 0, 0, stream=1)), 0)

    def test_of_updates_behind_a_mask(self) -> None:
        made = self.node(aten.mm.default, self.x, self.x)
        mask = self.node(aten.gt.Scalar, self.x, 0, stream=1)
        known = {"stream": 1, "written": "masked_fill_"}
        self.assertEqual(self.stream(self.node(aten.where.self, mask, self.x, made, **known)), 0)
        self.assertIsNone(self.stream(self.node(aten.where.self, mask, made, self.x, **known)))
        storage = (("mm", 2),)
        updated = self.node(aten.where.self, mask, self.x, made, eager_storage=storage, **known)
        self.assertEqual(self.stream(updated), 2)

    def test_of_updates_that_become_several_operations(self) -> None:
        made = self.node(aten.mm.default, self.x, self.x, eager_storage=(("mm", 0),))
        known = {"stream": 1, "written": "lerp_", "eager_storage": (("mm", 0),)}
        difference = self.node(aten.sub.Tensor, self.node(aten.mm.default, self.x, self.x, stream=1), made, **known)
        updated = self.node(aten.add.Tensor, self.node(aten.mul.Tensor, difference, 2, **known), made, **known)
        self.assertEqual(self.stream(updated), 0)
        self.assertEqual(self.reads(updated), (ForeignRead(0, "other"),))

    def test_of_updates_of_lists(self) -> None:
        made, other = (self.node(aten.mm.default, self.x, self.x, stream=s) for s in (0, 2))
        updated = self.node(aten._foreach_add.Scalar, [made, other, self.x], 1, stream=1, written="_foreach_add_")
        parts = [self.node(operator.getitem, updated, i, stream=1, written="_foreach_add_") for i in range(3)]
        self.assertEqual([self.stream(part) for part in parts], [0, 2, None])
        self.assertEqual(self.reads(updated), (ForeignRead(0, "other"), ForeignRead(2, "other")))
        made = self.node(aten._foreach_add.Scalar, [made, other], 1, stream=1, written="_foreach_add")
        part = self.node(operator.getitem, made, 0, stream=1)
        self.assertEqual(self.stream(part), 1)
        mask = self.node(aten.gt.Scalar, part, 0)
        known = {"written": "masked_fill_", "eager_storage": (("getitem", 1),)}
        self.assertEqual(
            self.reads(self.node(aten.where.self, mask, self.x, part, **known)), (ForeignRead(1, "other"),)
        )
        lists = [self.x], [other], [other], [self.x], [other]
        updated = self.node(aten._fused_adam.default, *lists, [self.x], stream=1, written=torch._fused_adam_)
        for k, stream in ((0, None), (1, 2), (4, 2)):
            results = self.node(operator.getitem, updated, k, stream=1, written=torch._fused_adam_)
            self.assertIsNone(self.stream(results))
            part = self.node(operator.getitem, results, 0, stream=1, written=torch._fused_adam_)
            self.assertEqual(self.stream(part), stream)

    def test_of_lists_whose_storages_are_known(self) -> None:
        """The list that is read first need not be the one that is updated."""
        made = self.node(aten.mm.default, self.x, self.x, eager_storage=(("mm", 0),))
        other = self.node(aten.mm.default, self.x, self.x, stream=2, eager_storage=(("mm_1", 2),))
        known = {"stream": 1, "written": torch._foreach_lerp_, "eager_storage": (("mm", 0), ("mm_1", 2))}
        updated = self.node(aten._foreach_add.List, [self.x, self.x], [made, other], **known)
        parts = [self.node(operator.getitem, updated, i, **known) for i in range(2)]
        self.assertEqual([self.stream(part) for part in parts], [0, 2])
        self.assertEqual(self.reads(updated), (ForeignRead(0, "other"), ForeignRead(2, "other")))

    def test_of_scatters_that_the_user_calls(self) -> None:
        for written in ("slice_scatter", torch.slice_scatter):
            made = self.node(aten.slice_scatter.default, self.x, self.x, stream=1, written=written)
            self.assertEqual(self.stream(made), 1)
        self.assertIsNone(self.stream(self.node(aten.slice_scatter.default, self.x, self.x, written="add_")))

    def call(self, target: Any, /, *args: Any, stream: int, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        place_on(node, stream)
        return node

    def test_of_updates_by_operators_and_kernels_of_the_user(self) -> None:
        """Their results are the memory of what they were given, which lives on; what they only read is not."""
        higher = torch.ops.higher_order
        made, read = (self.node(aten.mm.default, self.x, self.x, stream=s) for s in (0, 2))
        add_to = torch.ops.overlay_test.add_to.default
        kernel = {"kwargs": {"x": read, "out": made}, "tensors_to_clone": ["out"]}
        for call, index in (
            (self.call(higher.triton_kernel_wrapper_functional, stream=1, **kernel), "out"),
            (self.call(higher.auto_functionalized_v2, add_to, stream=1, x=read, _all_bases=[made]), 1),
            (self.call(higher.auto_functionalized, add_to, stream=1, target=made, x=read), 1),
        ):
            updated = self.node(operator.getitem, call, index, stream=1)
            self.assertEqual(self.stream(updated), 0)
            self.assertEqual(self.reads(call), (ForeignRead(0, "other"), ForeignRead(2, "freed")))
            again = self.node(operator.getitem, self.node(aten.mul.Tensor, updated, 2, stream=1), 0, stream=1)
            self.assertEqual(self.stream(again), 1)

    def test_of_targets(self) -> None:
        side, callers = ("side", 2), ("callers", None)
        for storage, stream in (side, 2), (callers, None):
            given = {"stream": 1, "is_given": True, "eager_storage": (storage,)}
            self.assertEqual(self.stream(self.node(aten.mul.Tensor, self.x, 3, **given)), stream)
        given = {"stream": 1, "is_given": True, "eager_storage": (side, callers)}
        made = self.node(aten.max.dim, self.x, 1, **given)
        results = [self.node(operator.getitem, made, i, **given) for i in range(2)]
        self.assertEqual([self.stream(r) for r in results], [2, None])

    def test_foreign_reads(self) -> None:
        made, other = (self.node(aten.mm.default, self.x, self.x, stream=s) for s in (1, 2))
        self.assertEqual(self.reads(self.node(aten.add.Tensor, made, other, stream=1)), (ForeignRead(2, "freed"),))
        self.assertEqual(
            self.reads(self.node(aten.add.Tensor, made, other)),
            (ForeignRead(1, "freed"), ForeignRead(2, "freed")),
        )
        self.assertEqual(self.reads(self.node(aten.add.Tensor, self.x, self.x, stream=1)), ())

    def test_of_results_that_were_updated(self) -> None:
        """Their readers know the memory that the graph returns, but not what an update has made of it."""
        made = self.node(aten.mm.default, self.x, self.x, stream=1, eager_storage=(("mm", 1),))
        read = self.node(aten.mul.Tensor, made, 2)
        updated = self.node(aten.add.Tensor, made, 1, stream=1, written="add_", eager_storage=(("mm", 1),))
        for results, known in (
            ((), ForeignRead(1, "freed")),
            ((made,), ForeignRead(1, "kept", made.name)),
            ((made, updated), ForeignRead(1, "other")),
        ):
            self.assertEqual(self.table(*results).foreign_reads(read), (known,))

    def record(self, value: Node, stream: int) -> Node:
        return self.graph.call_function(torch.ops.streams.record_stream.default, (value, stream))

    def streams_of(self, result: Node, goes_on: bool = False) -> list[tuple[int, ...]]:
        self.graph.output((result,)).meta["desc"] = [PlainAOTOutput(0)]
        return [found.streams for found in MemoryTable(self.graph).results((1, 2), FrameFacts(goes_on=goes_on))]

    def test_of_results_that_were_recorded(self) -> None:
        """What was recorded for the memory before the last update holds for the memory after it."""
        known = {"stream": 1, "eager_storage": (("mm", 1),)}
        made = self.node(aten.mm.default, self.x, self.x, **known)
        self.record(made, 2)
        updated = self.node(aten.add.Tensor, made, 1, written="add_", **known)
        self.record(updated, 3)
        self.assertEqual(self.streams_of(updated), [(1, 2)])

    def test_of_results_that_live_on_after_a_graph_break(self) -> None:
        made = self.node(aten.mm.default, self.x, self.x, stream=1)
        view = self.node(aten.permute.default, made, [1, 0], stream=2)
        updated = self.node(aten.add.Tensor, made, 1, stream=2, written="add_")
        self.assertEqual([self.streams_of(result, goes_on=True) for result in (view, updated)], [[(1,)], [(1, 2)]])

    def test_recorded_input_is_named_itself(self) -> None:
        """Whether the update, the value that is written back, or only its storage is known."""
        self.x.meta["val"] = None
        storage = (("x", None),)
        recorded = [self.record(self.node(aten.add.Tensor, self.x, 1, stream=1, written="add_"), 1)]
        value = self.node(aten.mul.Tensor, self.x, 2, stream=1)
        earlier, later = (self.node(aten.mul.Tensor, self.x, k, stream=1, eager_storage=storage) for k in (3, 4))
        recorded += [self.record(value, 1), self.record(earlier, 1)]
        for written in (value, later):
            self.graph.call_function(aten.copy_.default, (self.x, written))
        other = self.node(aten.mul.Tensor, self.x, 5, stream=1)
        recorded.append(self.record(other, 1))
        self.table().record_inputs()
        self.assertEqual([record.args[0] for record in recorded], [self.x, self.x, self.x, other])


@torch.library.custom_op("overlay_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1, x + 2]


@twice.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


@torch.library.custom_op("overlay_test::nested", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor[], Tensor[])")
def nested(x: torch.Tensor) -> Any:
    return x + 1, [x + 1, x + 2], [x + 1, x + 2]


@nested.register_fake
def _(x: torch.Tensor) -> Any:
    return torch.empty_like(x), [torch.empty_like(x) for _ in range(2)], [torch.empty_like(x) for _ in range(2)]


LISTS = {  # made by one operator, and updated by another
    "foreach": (lambda x: torch._foreach_add([x, x], 1), lambda u: torch._foreach_sub_(u, 1)),
    "one_of_them": (lambda x: torch._foreach_add([x, x], 1), lambda u: torch._foreach_sqrt_(u[1:])),
    "copies": (lambda x: torch._foreach_add([x, x], 1), lambda u: torch._foreach_copy_(u, torch._foreach_mul(u, 2))),
    "custom": (lambda x: torch.ops.overlay_test.twice(x), lambda u: torch._foreach_copy_(u, u[::-1])),
    "list_among_results": (lambda x: torch.ops.overlay_test.nested(x)[2], lambda u: torch._foreach_sub_(u, 1)),
    "several_results": (lambda x: [*torch.var_mean(x, 0)], lambda u: torch._foreach_addcmul_(u[::-1], u, u)),
}


UPDATED_BY_A_CALL = {  # each is a new tensor in eager; a fallback updates what another stream has made
    "index_copy": lambda a, i, y: torch.index_copy(a, 0, i, y),
    "index_put": lambda a, i, y: torch.index_put(a, (i,), y),
    "index_add": lambda a, i, y: torch.index_add(a, 0, i, y),
    "index_put_twice": lambda a, i, y: torch.index_put(torch.index_put(a, (i,), y), (i,), y * 2),
    "part_of_index_put": lambda a, i, y: torch.index_put(a, (i,), y)[1:],
}


@instantiate_parametrized_tests
class TestPlans(TestCase):
    @simulated_gpu()
    def exit_waits(self, update: bool) -> list[tuple[int, int]]:
        """Which streams wait at the exit; `update`: the side stream updates a tensor, or else makes one."""
        side = torch.cuda.Stream()

        def fn(x):
            current = torch.cuda.current_stream()
            total = x @ x
            side.wait_stream(current)
            with torch.cuda.stream(side):
                total = total.add_(x @ x) if update else total + x @ x
            current.wait_stream(side)
            return total @ x

        (plan,) = compile_only(fn, torch.ones(64, 64, device="cuda")).plans
        return [wait for event in plan.events for wait in event.waits if wait[0] == len(plan.ops)]

    def test_side_memory_that_dies_is_freed_as_in_eager(self) -> None:
        self.assertEqual(self.exit_waits(update=False), [])

    def test_side_memory_that_eager_never_allocates_is_settled(self) -> None:
        self.assertEqual([stream for _, stream in self.exit_waits(update=True)], [1])

    @parametrize("kind", list(LISTS))
    @simulated_gpu()
    def test_side_memory_of_a_list_that_is_updated_and_returned_is_settled(self, kind: str) -> None:
        side = torch.cuda.Stream()
        make, update = LISTS[kind]

        def fn(x):
            fork(side)
            with torch.cuda.stream(side):
                listed = make(x)
            join(side)
            update(listed)
            return listed

        report = check(fn, torch.ones(8, 16, device="cuda"))
        self.assertTrue(report.ok, str(report))

    @parametrize("kind", list(UPDATED_BY_A_CALL))
    @simulated_gpu()
    def test_result_that_a_call_puts_into_memory_of_another_stream_may_be_dropped(self, kind: str) -> None:
        side = torch.cuda.Stream()

        def fn(x, y, i):
            fork(side)
            with torch.cuda.stream(side):
                made = x * 4 / 4
            join(side)
            return UPDATED_BY_A_CALL[kind](made, i, y)

        x, y = (torch.ones(5, 5, dtype=torch.complex64, device="cuda") for _ in range(2))
        report = check(fn, x, y, torch.ones(5, dtype=torch.int64, device="cuda"))
        self.assertTrue(report.ok, str(report))

    @simulated_gpu()
    def test_result_beside_an_effect_may_be_dropped(self) -> None:
        """The token of the check for a singular matrix has a description, and is no output for Inductor."""
        side = torch.cuda.Stream()

        def fn(x, y):
            fork(side)
            with torch.cuda.stream(side):
                solved = torch.linalg.solve(x, y)
            join(side)
            return solved

        report = check(fn, torch.ones(5, 5, device="cuda"), torch.ones(5, device="cuda"), mode="reduce-overhead")
        self.assertTrue(report.ok, str(report))
