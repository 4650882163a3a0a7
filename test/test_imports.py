"""Modules of the package import each other in one direction only, at their top and inside of functions."""

from __future__ import annotations

import ast
import unittest
from typing import TYPE_CHECKING

import torch.testing._internal.common_utils as common

import form


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set as AbstractSet
    from pathlib import Path

PACKAGE = "torch_overlay"
# Circles that are left, each closed by an import inside of a function. None may be added.
KNOWN = (
    {"_functorch.offload.settings", "_options", "config"},
    {"", "_engine.late_import"},
    {
        f"analysis.timelines.{name}"
        for name in ["clock", "json", "layout", "lines", "model", "offload", "profile", "svg"]
    },
)


def modules() -> dict[str, Path]:
    """Name of each module below the package -> its file; the package itself is ''."""
    root = form.ROOT / PACKAGE
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(module, name or '', inside of a function) of each import that runs; those for type checkers don't."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from ((child.module, alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, "", inside) for alias in child.names)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imports(child, inside or is_function)


def graph(known: Mapping[str, Path], inside: bool) -> dict[str, set[str]]:
    """Module -> the modules that it imports; with `inside`, also those that its functions import."""
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for source, name, is_inside in imports(ast.parse(path.read_text())):
            if source.partition(".")[0] != PACKAGE or (is_inside and not inside):
                continue
            source = source.removeprefix(PACKAGE).removeprefix(".")
            target = f"{source}.{name}".strip(".") if name else source
            found[module].add(target if target in known else source)
        found[module].discard(module)
    return found


def circles(edges: Mapping[str, AbstractSet[str]]) -> list[set[str]]:
    """Sets of modules each of which imports all others, directly or not."""
    reached: dict[str, set[str]] = {}
    for module in edges:
        seen, todo = set(), [module]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[module] = seen
    found = []
    for module in sorted(edges):
        circle = {other for other in reached[module] if module in reached.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


@form.overlay_only
class TestImports(common.TestCase):
    def test_no_circle_when_modules_are_loaded(self) -> None:
        self.assertEqual(circles(graph(modules(), inside=False)), [])

    def test_no_new_circle_with_what_functions_import(self) -> None:
        found = circles(graph(modules(), inside=True))
        self.assertEqual(sorted(map(sorted, found)), sorted(map(sorted, KNOWN)))

    def test_a_circle_is_found(self) -> None:
        self.assertEqual(circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}), [{"a", "b", "c"}])
        self.assertEqual(circles({"a": {"b"}, "b": {"c"}, "c": set()}), [])


if __name__ == "__main__":
    unittest.main()
