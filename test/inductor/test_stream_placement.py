"""What passes make runs where the user put what it stands for."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from corpus import check_program, findings
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.test_case import TestCase
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
import relaunch_programs
from stream_programs import PROGRAMS
from stream_programs._quiet import quiet
from stream_programs.drawn import checked
from stream_programs.drawn.kit import as_program
from stream_programs.drawn.steps import LARGEST, Spec
from stream_programs.drawn.writer import write
from torch_overlay import config
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import node_stream, place_on
from torch_overlay._functorch.streams.tokens import caller_event, synchronization
from torch_overlay._inductor.streams.pass_log import PassLog
from torch_overlay.testing import compile_only, observe, placement_checked, simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

ONE_STREAM = [p for p in PROGRAMS if p.group == "one_stream"]
UPDATES = [p.name for p in relaunch_programs.PROGRAMS if p.group == "mutation" and p.ranks == 1 and not p.alone]


def on_callers_stream(plan: Any) -> list[str]:
    """The operations of the caller's stream that launch something."""
    return [op.name for op in plan.ops if op.stream == 0]


def waits(plan: Any) -> int:
    return sum(len(event.waits) for event in plan.events) + len(plan.boundary_waits)


class TestOneSideStream(TestCase):
    """All of a function is on one side stream, and so is all that compiled code does."""

    @parametrize("name", form.sampled([p.name for p in ONE_STREAM], 5))
    def test_is_ordered_as_eager_is(self, name: str) -> None:
        (program,) = (p for p in ONE_STREAM if p.name == name)
        for mode in program.modes:
            report = check_program(program, mode)
            self.assertEqual(findings(report), [], mode)
            if mode is None:
                self.assertEqual(report.redundant, [])

    @parametrize("name", form.sampled([p.name for p in ONE_STREAM if p.name != "rows_updated_on_two_streams"], 5))
    def test_keeps_to_it(self, name: str) -> None:
        (program,) = (p for p in ONE_STREAM if p.name == name)
        with simulated_gpu(), config.patch(fold_branches_below_us=0.0), quiet(), observe() as seen:
            torch._dynamo.reset()
            instance = program.instance(program.compiler())
            instance.fn(*program.make_inputs("cuda", torch.Generator().manual_seed(1)))
        self.assertGreater(len(seen.plans), 0)
        for plan in seen.plans:
            self.assertEqual(on_callers_stream(plan), [], plan.table())
            self.assertLessEqual(waits(plan), 2, plan.table())

    @parametrize("name", form.sampled(UPDATES, 5))
    def test_updates_of_programs_without_streams(self, name: str) -> None:
        """The programs of the graphs' corpus that write in place, with each compiled function put on a side stream."""
        with simulated_gpu(), config.patch(fold_branches_below_us=0.0), quiet(), observe() as seen:
            torch._dynamo.reset()
            relaunch_programs.by_name(name).body(_SideKit())
        self.assertGreater(len(seen.regions), 0)
        for plan in seen.plans:
            self.assertEqual(on_callers_stream(plan), [], plan.table())
            self.assertLessEqual(waits(plan), 2, plan.table())

    @parametrize("number", form.sampled(range(12), 3))
    def test_random_body(self, number: int) -> None:
        rng = random.Random(number)
        kinds = ("compute", "in_place", "in_place", "view", "delete", "branch", "loop")
        steps = [(rng.choice(kinds), *(rng.randint(0, LARGEST) for _ in range(3))) for _ in range(12)]
        program = as_program(write(Spec(1, steps=(("enter", 0, 0, 0), *steps))), f"one_stream_{number}")  # type: ignore[arg-type]
        with observe() as seen:
            report = checked.report(program, None, calls=1)
        self.assertEqual(checked.findings(report), [])
        for plan in seen.plans:
            self.assertEqual(on_callers_stream(plan), [], plan.table())


class _SideKit(relaunch_programs.Kit):
    """Compiles functions whose body is on a side stream, and takes one step."""

    def __init__(self) -> None:
        super().__init__("plain", "cuda")
        self.side = torch.cuda.Stream()  # type: ignore[assignment]

    @property
    def graphs(self) -> bool:
        return False

    def compile(self, fn: Any, **kwargs: Any) -> Any:
        side: Any = self.side

        @functools.wraps(type(fn).forward if isinstance(fn, torch.nn.Module) else fn)
        def body(*args: Any, **kwargs: Any) -> Any:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                result = fn(*args, **kwargs)
            current.wait_stream(side)
            return result

        return torch.compile(body, **kwargs)

    def steps(self, count: int = 1) -> Iterator[int]:
        yield 0


# ---- passes


def graph_on_streams(*streams: int) -> GraphModule:
    """x -> relu -> relu -> ..., one for each of the streams, and all are returned."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    made = []
    for i, stream in enumerate(streams):
        value = graph.call_function(aten.relu.default, (value,), name=f"relu_{i}")
        value.meta["val"] = torch.empty(4, device="meta")
        place_on(value, stream)
        note_fact(value, after=(caller_event(i),), before=(synchronization(i),))
        made.append(value)
    graph.output(tuple(made))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def apply(gm: GraphModule, change: Callable[[Graph], Any]) -> Any:
    return GraphTransformObserver(gm, "made_up").apply_graph_pass(change)


def named(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def placement(node: Node) -> tuple[int, Any, Any]:
    fact = fact_of(node)
    return node_stream(node), *(known and tuple(map(str, known)) for known in (fact.after, fact.before))


class TestPasses(TestCase):
    def replace(self, graph: Graph, name: str, make: Callable[[Graph, Node], Node]) -> Node:
        old = next(n for n in graph.nodes if n.name == name)
        with graph.inserting_before(old):
            new = make(graph, old.args[0])  # type: ignore[arg-type]
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        return new

    def test_node_takes_what_it_replaces(self) -> None:
        gm = graph_on_streams(1, 2)

        def change(graph: Graph) -> None:
            self.replace(graph, "relu_1", lambda g, x: g.call_function(aten.sigmoid.default, (x,)))

        apply(gm, change)
        self.assertEqual(placement(named(gm, "sigmoid_default")), (2, ("e1",), ("h1",)))

    def test_helper_runs_where_its_reader_does(self) -> None:
        gm = graph_on_streams(1, 2)

        def make(graph: Graph, x: Node) -> Node:
            return graph.call_function(aten.neg.default, (graph.call_function(aten.abs.default, (x,)),))

        apply(gm, lambda graph: self.replace(graph, "relu_1", make) and None)
        self.assertEqual(placement(named(gm, "abs_default")), (2, ("e1",), ("h1",)))

    def test_write_in_place_takes_what_goes_with_it(self) -> None:
        """The last two nodes become writes into the first one's memory, each with what it replaces."""
        gm = graph_on_streams(1, 2, 3)

        def change(graph: Graph) -> None:
            made = named(gm, "relu_0")
            for name in ("relu_1", "relu_2"):
                old = named(gm, name)
                with graph.inserting_before(old):
                    graph.call_function(aten.relu_.default, (made,), name=f"{name}_write")
                old.replace_all_uses_with(made)
                graph.erase_node(old)

        apply(gm, change)
        self.assertEqual(placement(named(gm, "relu_1_write")), (2, ("e1",), ("h1",)))
        self.assertEqual(placement(named(gm, "relu_2_write")), (3, ("e2",), ("h2",)))
        self.assertEqual(placement(named(gm, "relu_0")), (1, ("e0",), ("h0",)))

    def test_node_that_is_made_and_replaced_in_the_pass_hands_on_its_placement(self) -> None:
        gm = graph_on_streams(0, 1)

        def change(graph: Graph) -> None:
            first = self.replace(graph, "relu_1", lambda g, x: g.call_function(aten.sigmoid.default, (x,)))
            self.replace(graph, first.name, lambda g, x: g.call_function(aten.neg.default, (x,)))

        apply(gm, change)
        self.assertEqual(placement(named(gm, "neg_default")), (1, ("e1",), ("h1",)))

    def test_node_that_does_what_several_did_promises_what_they_promised(self) -> None:
        gm = graph_on_streams(1, 1)

        def change(graph: Graph) -> None:
            x = named(gm, "x")
            with graph.inserting_before(named(gm, "relu_0")):
                both = graph.call_function(aten.sigmoid.default, (x,))
            for name in ("relu_1", "relu_0"):
                old = named(gm, name)
                old.replace_all_uses_with(both)
                graph.erase_node(old)

        apply(gm, change)
        self.assertEqual(placement(named(gm, "sigmoid_default")), (1, ("e0", "e1"), ("h0", "h1")))

    def test_constant_that_the_caller_gets_stays(self) -> None:
        """A node that replaces none, and that nobody reads but the caller, runs where its operand was computed."""
        gm = graph_on_streams(1)

        def change(graph: Graph) -> None:
            output = graph.output_node()
            with graph.inserting_before(output):
                made = graph.call_function(aten.clone.default, (named(gm, "relu_0"),))
            output.args = ((*output.args[0], made),)  # type: ignore[misc]

        apply(gm, change)
        self.assertEqual(placement(named(gm, "clone_default")), (1, ("e0",), ("h0",)))

    def test_survivor_keeps_its_placement(self) -> None:
        gm = graph_on_streams(1, 2)

        def change(graph: Graph) -> None:
            named(gm, "relu_0").meta["custom"] = named(gm, "relu_1").meta["custom"]

        apply(gm, change)
        self.assertEqual(node_stream(named(gm, "relu_0")), 1)

    def test_hooks_are_gone_when_a_pass_has_failed(self) -> None:
        gm = graph_on_streams(1)
        with self.assertRaises(ZeroDivisionError):
            apply(gm, lambda graph: 1 // 0)
        self.assertEqual(
            (gm._create_node_hooks, gm._replace_hooks, gm._erase_node_hooks, gm._deepcopy_hooks), ([],) * 4
        )
        self.assertIsNone(PassLog.of(gm.graph))

    def test_a_copy_that_a_pass_makes_of_the_module_has_no_hooks(self) -> None:
        gm = graph_on_streams(1)
        copied = apply(gm, lambda graph: copy.deepcopy(gm))
        self.assertEqual(
            (copied._create_node_hooks, copied._replace_hooks, copied._erase_node_hooks, copied._deepcopy_hooks),
            ([],) * 4,
        )

    def test_pass_within_a_pass_is_a_part_of_it(self) -> None:
        gm = graph_on_streams(1, 2)

        def change(graph: Graph) -> None:
            with GraphTransformObserver(gm, "inner"):
                self.replace(graph, "relu_1", lambda g, x: g.call_function(aten.sigmoid.default, (x,)))
            self.assertIsNotNone(PassLog.of(gm.graph))

        apply(gm, change)
        self.assertEqual(placement(named(gm, "sigmoid_default")), (2, ("e1",), ("h1",)))

    def test_graph_without_streams_is_not_watched(self) -> None:
        gm = graph_on_streams(0)
        named(gm, "relu_0").meta.clear()
        apply(gm, lambda graph: self.assertEqual(gm._create_node_hooks, []))


class TestCheck(TestCase):
    """The check that tests make after each pass."""

    def test_names_the_pass_and_the_node(self) -> None:
        def forget(graph: Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=aten.mm.default):
                node.meta.pop("custom")

        with simulated_gpu(), placement_checked(), self.assertRaises(InductorError) as caught:
            side = torch.cuda.Stream()

            def fn(x: torch.Tensor) -> torch.Tensor:
                with torch.cuda.stream(side):
                    return (x @ x).relu()

            # After the last pass, where nothing puts it back.
            with mock.patch.object(compile_fx, "post_grad_passes", _then(compile_fx.post_grad_passes, forget)):
                compile_only(fn, torch.randn(4, 4, device="cuda"))
        self.assertIn(
            "Unplaced: after all passes, mm = aten.mm.default has no placement; it reads ", str(caught.exception)
        )


def _then(passes: Callable[..., Any], change: Callable[[Graph], None]) -> Callable[..., Any]:
    def both(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        result = passes(gm, *args, **kwargs)
        change(gm.graph)
        return result

    return both


instantiate_parametrized_tests(TestOneSideStream)
