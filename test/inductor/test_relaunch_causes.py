"""Each reason for work outside of a graph has a cause with a title and a remedy, and stands in the documentation."""

import ast
import unittest
from collections.abc import Iterator

import form
from torch_overlay import cudagraphs  # noqa: F401  # with the policy's cause
from torch_overlay._inductor.relaunch import causes


ELSEWHERE = ("graph-break", "host-wait", "eager", "eager-optimizer", "eager-backward", "recompiled")  # the doctor's
RAISED = ("Unprovable", "_found", "_refuse", "refuse", "_outside", "of")


def constants(node: ast.AST | None) -> Iterator[str]:
    """The words that an argument can be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, (ast.IfExp, ast.BoolOp)):
        for part in (node.body, node.orelse) if isinstance(node, ast.IfExp) else node.values:
            yield from constants(part)


def named() -> Iterator[tuple[str, str]]:
    """(code, where) of each cause that the sources name."""
    for path in (form.ROOT / "torch_overlay/_inductor/relaunch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
                if name in RAISED:
                    for argument in node.args[:2]:
                        yield from ((code, f"{path.name}:{node.lineno}") for code in constants(argument))


@form.overlay_only
class TestCauses(unittest.TestCase):
    def test_every_reason_has_a_cause(self) -> None:
        found = [(code, where) for code, where in named() if " " not in code]
        self.assertGreater(len(found), 40)
        self.assertEqual([each for each in found if each[0] not in causes.CAUSES], [])

    def test_every_cause_is_documented_as_it_is_told(self) -> None:
        lines = (form.ROOT / "docs/cuda_graphs.md").read_text().splitlines()
        rows = [f"| `{code}` | {c.title} | {c.remedy or 'nothing'} |" for code, c in causes.CAUSES.items()]
        self.assertEqual([row for row in rows if row not in lines], [])
        documented = [line.split("`")[1] for line in lines[lines.index(rows[0]) :] if line.startswith("| `")]
        self.assertEqual(documented, list(causes.CAUSES))

    def test_a_cause_that_is_named_nowhere_is_dead(self) -> None:
        text = "\n".join(p.read_text() for p in (form.ROOT / "torch_overlay/_inductor/relaunch").rglob("*.py"))
        told = [code for code in causes.CAUSES if text.count(f'"{code}"') < 2 and code not in ELSEWHERE]
        self.assertEqual(told, [])

    def test_inductors_reasons(self) -> None:
        for reason, code in (
            ("cpu ops", "split-host"),
            ("Switch ops", "split-control-flow"),
            ("cross-device ops", "split-devices"),
            ("custom partition op: a::b", "split-named"),
            ("unbacked binding ops", "split-data-dependent"),
            ("CUDAGraph-unsafe custom ops", "split-unsafe"),
            ("dynamic shape ops", "split-dynamic"),
            ("stream operation record_event", "split-streams"),
            ("something new", "split-other"),
        ):
            self.assertEqual(causes.of_partition(reason), code)
