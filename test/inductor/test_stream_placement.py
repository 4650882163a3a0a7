"""What passes make runs where the user put what it stands for."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from corpus import check_program, compile_program, findings
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.test_case import TestCase
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
import relaunch_programs
from stream_programs import by_name, PROGRAMS
from stream_programs._quiet import quiet
from stream_programs.drawn import checked
from stream_programs.drawn.kit import as_program
from stream_programs.drawn.steps import LARGEST, Spec
from stream_programs.drawn.writer import write
from torch_overlay import config
from torch_overlay.testing import compile_only, observe, placement_checked, simulated_gpu


aten = torch.ops.aten

ONE_STREAM = [p for p in PROGRAMS if p.group == "one_stream"]
UPDATES = [p.name for p in relaunch_programs.PROGRAMS if p.group == "mutation" and p.ranks == 1 and not p.alone]


def on_callers_stream(plan: Any) -> list[str]:
    """The operations of the caller's stream that launch something."""
    return [op.name for op in plan.ops if op.stream == 0]


def waits(plan: Any) -> int:
    return sum(len(event.waits) for event in plan.events) + len(plan.boundary_waits)


@instantiate_parametrized_tests
class TestOneSideStream(TestCase):
    """All of a function is on one side stream, and so is all that compiled code does."""

    @parametrize("name", form.sampled([p.name for p in ONE_STREAM], 5))
    def test_is_ordered_as_eager_is(self, name: str) -> None:
        program = by_name(name)
        for mode in program.modes:
            report = check_program(program, mode)
            self.assertEqual(findings(report), [], mode)
            if mode is None:
                self.assertEqual(report.redundant, [])

    @parametrize("name", form.sampled([p.name for p in ONE_STREAM if p.name != "rows_updated_on_two_streams"], 5))
    def test_keeps_to_it(self, name: str) -> None:
        self.check_plans(compile_program(by_name(name))[0].plans)

    def check_plans(self, plans: list[Any]) -> None:
        self.assertGreater(len(plans), 0)
        for plan in plans:
            self.assertEqual(on_callers_stream(plan), [], plan.table())
            self.assertLessEqual(waits(plan), 2, plan.table())

    @parametrize("name", form.sampled(UPDATES, 5))
    def test_updates_of_programs_without_streams(self, name: str) -> None:
        """The programs of the graphs' corpus that write in place, with each compiled function put on a side stream."""
        with simulated_gpu(), config.patch(fold_branches_below_us=0.0), quiet(), observe() as seen:
            torch._dynamo.reset()
            relaunch_programs.by_name(name).body(_SideKit())
        self.assertGreater(len(seen.regions), 0)
        if seen.plans:
            self.check_plans(seen.plans)

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
